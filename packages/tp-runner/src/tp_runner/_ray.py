"""Workers that are actors on a Ray cluster: one for each device, placed by the resources it needs."""

import contextlib
import importlib
import pickle
import time
from typing import Any, ClassVar

from tp_core.errors import ConfigError

from tp_runner._failure import INIT, RESULT, Failure
from tp_runner._fleet import Chunk, Died, Done, Event, Fleet, Ready, Timing
from tp_runner._program import dump_program
from tp_runner._report import failure_to_error
from tp_runner._settings import Settings

__all__ = ["RayFleet"]

WAKE_S = 0.02
"""Ray cannot be woken up from another thread, so a longer wait is made of such short ones."""


class RayFleet(Fleet):
    """One actor for each device, in the cluster that this process is connected to.

    An actor for a CUDA device takes one GPU of the cluster, whichever is free, as its device 0.
    """

    most_credits: ClassVar[int] = 2

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        self._ray = _import_ray()
        self.devices = devices
        self._program = dump_program(program)
        self._settings = settings
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._inflight: dict[Any, tuple[int, int, int]] = {}
        self._woken = False

    def start(self) -> list[Event]:
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        missing = [worker for worker in range(self.size) if worker not in self._actors]
        for worker in missing:
            self._launch(worker)
        others: list[Event] = []
        while self._starting:
            for event in self.poll(None):
                if isinstance(event, Died) and event.worker in missing:
                    self.reset()
                    failure = event.failure or Failure(INIT, "its actor died before it was ready")
                    device = self.devices[event.worker]
                    raise failure_to_error(failure, device=device, worker=event.worker)
                if event.worker not in missing:
                    others.append(event)
        return others

    def _launch(self, worker: int) -> None:
        cuda = self.devices[worker].startswith("cuda")
        device = "cuda:0" if cuda else self.devices[worker]
        settings = self._settings
        actor = self._ray.remote(_Actor).options(num_cpus=1, num_gpus=1 if cuda else 0, max_concurrency=1)
        self._actors[worker] = handle = actor.remote(
            self._program, device, settings.batching, settings.threads
        )
        self._starting[handle.ready.remote()] = worker

    def revive(self, worker: int) -> None:
        self._launch(worker)

    def alive(self, worker: int) -> bool:
        return worker in self._actors

    def send(self, worker: int, chunk: Chunk) -> None:
        items, _ = _packed(chunk.items)
        chunk.nbytes = len(items)
        reference = self._actors[worker].work.remote(items, len(chunk.items))
        self._inflight[reference] = worker, chunk.seq, len(chunk.items)

    def poll(self, timeout_s: float | None) -> list[Event]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            references = [*self._starting, *self._inflight]
            left_s = WAKE_S if deadline is None else min(WAKE_S, deadline - time.monotonic())
            ready: list[Any] = []
            if references:
                ready, _ = self._ray.wait(
                    references, num_returns=len(references), timeout=0, fetch_local=False
                )
                if not ready and left_s > 0:
                    ready, _ = self._ray.wait(references, num_returns=1, timeout=left_s)
            elif left_s > 0:
                time.sleep(left_s)
            woken, self._woken = self._woken, False
            expired = deadline is not None and time.monotonic() >= deadline
            if ready or woken or expired:
                events: list[Event] = []
                for reference in ready:
                    self._take(reference, events)
                return events

    def _take(self, reference: Any, events: list[Event]) -> None:
        if reference in self._starting:
            worker = self._starting.pop(reference)
            failure = None
            try:
                data = self._ray.get(reference)
                failure = pickle.loads(data) if data else None
            except self._ray.exceptions.RayError:
                self._bury(worker, events)
                return
            if failure is None:
                events.append(Ready(worker))
            else:
                self._actors.pop(worker, None)
                events.append(Died(worker, None, failure=failure))
            return
        entry = self._inflight.get(reference)
        if entry is None:  # its worker's death was noticed by another one
            return
        worker, seq, n_items = entry
        try:
            data, failed, timing = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            self._bury(worker, events)
            return
        del self._inflight[reference]
        try:
            results = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, RESULT)] * n_items, True
        events.append(Done(worker, seq, results, failed, Timing(*timing), len(data)))

    def _bury(self, worker: int, events: list[Event]) -> None:
        if worker not in self._actors:
            return
        del self._actors[worker]
        mine = [(r, e) for r, e in self._inflight.items() if e[0] == worker]
        for reference, _ in mine:
            del self._inflight[reference]
        current = (mine[0][1][1], 0) if mine else None
        events.append(Died(worker, None, current))

    def wake(self) -> None:
        self._woken = True

    def reset(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._starting.clear()
        self._inflight.clear()

    def close(self, *, timeout_s: float) -> None:
        actors, failures = dict(self._actors), []
        if timeout_s > 0 and actors:
            ends = {actor.end.remote(): worker for worker, actor in actors.items()}
            done, _ = self._ray.wait(list(ends), num_returns=len(ends), timeout=timeout_s)
            for reference in done:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    if data := self._ray.get(reference):
                        failures.append((ends[reference], pickle.loads(data)))
        if self._ray.is_initialized():
            self.reset()
        for worker, failure in failures:
            raise failure_to_error(failure, device=self.devices[worker], worker=worker)


class _Actor:
    """What runs in the cluster; speaks in bytes, so that errors are ours and not Ray's."""

    def __init__(self, program: bytes, device: str, batching: Any, threads: int) -> None:
        self._program = program
        self._device = device
        self._batching = batching
        self._threads = threads
        self._work: Any = None
        self._waiting = time.monotonic()

    def ready(self) -> bytes:
        """Start; return a failure, if that is what it came to."""
        import sys

        try:
            self._work = pickle.loads(self._program)(self._device)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self._threads)
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            return pickle.dumps(Failure.of(error, INIT), 5)
        return b""

    def work(self, data: bytes, n_items: int) -> tuple[bytes, bool, tuple[float, float, float]]:
        """Work on a chunk; return its results, whether some are failures, and the timing."""
        from tp_runner._failure import ITEM
        from tp_runner._sender import pack_what_can_be
        from tp_runner._work import run_chunk

        began = time.monotonic()
        waited_s = began - self._waiting
        try:
            items = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, ITEM)] * n_items, True
        else:
            results, failed = run_chunk(self._work, items, [0, 0, 0], batching=self._batching)
        worked_s = time.monotonic() - began
        packed, _, unpicklable = pack_what_can_be(results, _packed)
        self._waiting = time.monotonic()
        return packed, failed or unpicklable, (began, waited_s, worked_s)

    def end(self) -> bytes:
        """End; return a failure, if that is what it came to."""
        from tp_runner._failure import END

        try:
            getattr(self._work, "close", lambda: None)()
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            return pickle.dumps(Failure.of(error, END), 5)
        return b""


def _packed(obj: Any) -> tuple[bytes, list[memoryview]]:
    import cloudpickle  # type: ignore[import-untyped]  # it has no stubs

    return cloudpickle.dumps(obj, protocol=5), []


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        msg = "engine 'ray' needs Ray; pip install tp-runner[ray]"
        raise ConfigError(msg) from error
