"""A watchdog that ends a run if a step exceeds step_timeout_s, with the stack and position of every rank."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not say so
from tp_core import LaunchEnvironment
from tp_core.data import StepOutput
from tp_core.output import flush_streams
from tp_core.plugins import Session
from tp_core.sessions import rendezvous_store

from tp_trainer._running._hard_exit import HardExit
from tp_trainer._steps._step import RunStep, Step

TIMEOUT_STATUS = 124
"""The exit status after a timeout, as of the command ``timeout``."""

_STDERR = 2
_TICK_S = 1.0  # the longest time between two looks
_GATHER_S = 10.0  # how long a rank waits for the positions of the others
_NATIVE_S = 10.0  # the most beyond the timeout; then native code that holds the GIL is ended from outside

_OTHERS_S = 20.0  # longer than _GATHER_S: ranks that run Python report first
_DUMP_S = 2.0  # for the fault handler to write, before the process ends

_rounds = count()


def watchdog_of(environment: LaunchEnvironment, timeout_s: float | None) -> "Watchdog | None":
    """Return the watchdog of a run, or ``None`` where a step may take any time."""
    if timeout_s is None:
        return None
    return Watchdog(environment, timeout_s)


class Watchdog:
    """Watches, from a thread, that steps make progress.

    A rank that waits too long calls the others through the launcher's store. Each rank writes the stacks of
    its threads to stderr and its position into the store; then all end. Where native code holds the GIL, the
    interpreter's fault handler, which needs no GIL, writes the stacks and ends the process.
    """

    def __init__(self, environment: LaunchEnvironment, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._steps = 0
        self._since = time.monotonic()
        self._is_paused = self._is_watching = False
        self._main = threading.get_ident()
        self._store: Any = None
        self._native: HardExit | None = None
        with suppress(OSError):  # not on Linux: the fault handler ends the process, with status 1
            self._native = HardExit(TIMEOUT_STATUS)

    def connect(self, session: Session) -> None:
        """Find the watchdogs of the other ranks.

        Collectives: one broadcast, if there are several ranks.
        """
        if self._environment.world_size > 1:
            # Rank 0's number for all: after a run that failed on some ranks alone, their counts differ.
            number = session.broadcast(next(_rounds), where="the number of a watchdog")
            name = f"tp/watchdog/{number}"
            self._store = PrefixStore(name, rendezvous_store(self._environment))

    def watch(self, run: RunStep) -> RunStep:
        """Return ``run``, wrapped so that each call counts as a step."""

        def counted(step: Step, model: nn.Module, batch: Any) -> StepOutput:
            self.note_step()
            return run(step, model, batch)

        return counted

    def note_step(self) -> None:
        self._steps += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._is_watching:
            yield
            return
        ending = threading.Event()
        look = threading.Thread(
            target=self._look, args=(self._timeout_s, ending), name="tp-watchdog", daemon=True
        )
        self._set_alarm()
        self._is_watching = True
        look.start()
        try:
            yield
        finally:
            self._is_watching = False
            ending.set()
            look.join()
            self._cancel_alarm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the context, as for writing a checkpoint."""
        if self._is_paused or not self._is_watching:
            yield
            return
        self._is_paused = True
        self._cancel_alarm()
        try:
            yield
        finally:
            self._set_alarm()
            self._is_paused = False

    def _set_alarm(self) -> None:
        """Restart the clock, and the alarms that need no GIL.

        Where native code holds the GIL, no thread restarts them, and they go off.
        """
        self._since = time.monotonic()
        native_s = self._timeout_s + min(_NATIVE_S, max(self._timeout_s, 2.0))
        if self._store is not None:
            native_s += _OTHERS_S  # the other ranks call and end first, with every rank's position
        if self._native is None:
            faulthandler.dump_traceback_later(native_s, exit=True, file=_STDERR)  # with status 1
        else:
            faulthandler.dump_traceback_later(native_s, file=_STDERR)
            self._native.set(native_s + _DUMP_S)

    def _cancel_alarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._native is not None:
            self._native.cancel()

    def _look(self, timeout_s: float, ending: threading.Event) -> None:
        seen = self._steps
        while not ending.wait(min(_TICK_S, timeout_s / 4)):
            if self._is_paused:
                continue
            if seen != self._steps:
                seen = self._steps
                self._set_alarm()
            elif time.monotonic() - self._since > timeout_s:
                self._end()
            if self._was_called():
                self._end()

    def _was_called(self) -> bool:
        """Return whether another rank has waited too long."""
        if self._store is None:
            return False
        try:
            return bool(self._store.check(["called"]))
        except RuntimeError:  # the rank that served the store is gone: the launcher ends this one
            self._store = None
            return False

    def _end(self) -> None:
        """Write stacks and the positions of all ranks, and end the process."""
        rank, timeout_s = self._environment.rank, self._timeout_s
        self._cancel_alarm()
        _write(f"tp_trainer: rank {rank} is in step {self._steps} for too long; the stacks of its threads:\n")
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        standings = [f"rank {rank} in {self._standing()}"]
        if self._store is not None:
            with suppress(RuntimeError):
                standings = self._gather()
        _write(
            f"tp_trainer: a step took longer than step_timeout_s={timeout_s:g} s, so the run is ended "
            f"with status {TIMEOUT_STATUS}:\n" + "".join(f"  {standing}\n" for standing in standings)
        )
        # From a thread, for a second at most: the thread that hangs may hold the lock of stdout.
        flush = threading.Thread(target=flush_streams, daemon=True)
        flush.start()
        flush.join(timeout=1.0)
        # sys.exit() would end this thread alone, while the main thread hangs.
        os._exit(TIMEOUT_STATUS)

    def _gather(self) -> list[str]:
        """Return the position of each rank that answers."""
        store, size = self._store, self._environment.world_size
        store.set("called", "")
        store.set(f"standing/{self._environment.rank}", json.dumps(self._standing()))
        deadline = time.monotonic() + _GATHER_S
        keys = [f"standing/{rank}" for rank in range(size)]
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        standings = []
        for rank, key in enumerate(keys):
            if store.check([key]):
                position = json.loads(store.get(key))
            else:
                position = "code that lets no Python run"
            standings.append(f"rank {rank} in {position}")
        store.add("read", 1)  # the rank that serves the store leaves last: without it the others read nothing
        while store.add("read", 0) < size and time.monotonic() < deadline:
            time.sleep(0.05)
        return standings

    def _standing(self) -> str:
        """Return the position of the training thread: the step, and the innermost frame outside torch."""
        # Private, and CPython's alone: there is no other way to see another thread's frame.
        frame = sys._current_frames().get(self._main)
        torch_path = str(Path(torch.__file__).parent)
        while (
            frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(torch_path)
        ):
            frame = frame.f_back
        if frame is None:
            return f"step {self._steps}"
        code = frame.f_code
        return f"step {self._steps}, {code.co_filename}:{frame.f_lineno} in {code.co_name}"


def _write(text: str) -> None:
    """Write to the descriptor: the thread that hangs may hold the lock of ``sys.stderr``."""
    with suppress(OSError):
        os.write(_STDERR, text.encode())
