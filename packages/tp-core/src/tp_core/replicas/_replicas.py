"""Replicas of one module: the one entrance to this package."""

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from torch import nn

from tp_core._devices import DeviceSpec, resolve_devices
from tp_core.errors import ConfigError, ModelError
from tp_core.replicas._caller import Caller, on_device
from tp_core.replicas._outcome import Outcome, raise_first
from tp_core.replicas._pace import Pace
from tp_core.replicas._random import Streams
from tp_core.replicas._residents import Residents
from tp_core.replicas._threads import Worker

__all__ = ["Replicas"]

R = TypeVar("R")


class Replicas:
    """One module on several devices, with a thread for each.

    Replica 0 is the module itself and runs in the caller's thread. The others have the module's
    attributes as they are when a call begins, buffers of their own, and parameters that are copied
    only when they changed since the last call; replicas on the module's own device share its
    parameters. Gradients of all of them add up in the module's parameters. On CPUs the caller runs
    all parts, one after the other, while they take less than waking a thread does.

    Changes that go around version counters (``parameter.data.add_(1)``) are not seen: call
    `refresh` after them. Fused optimizers do that too, and are taken care of.

    Args:
        module: The module; its parameters and buffers must be on the first device.
        devices: One device per replica, the same one several times if wanted; whatever
            `tp_core.resolve_devices` understands.
        force_copies: Copy the parameters for every replica, also on the module's own device: for
            tests of what needs several devices otherwise.

    Attributes:
        module: The module.
        devices: One device per replica.

    Raises:
        DeviceError: There are no devices, or one does not exist here.

    Example:
        >>> import torch
        >>> replicas = Replicas(torch.nn.Linear(2, 1), ["cpu", "cpu"])
        >>> parts = [torch.zeros(3, 2), torch.zeros(2, 2)]
        >>> [y.shape[0] for y in replicas.run(lambda replica, x: replica(x), parts)]
        [3, 2]
    """

    def __init__(
        self,
        module: nn.Module,
        devices: DeviceSpec,
        *,
        force_copies: bool = False,
    ) -> None:
        self.module = module
        self.devices = resolve_devices(devices)
        self._force_copies = force_copies
        self._types = tuple(dict.fromkeys(d.type for d in self.devices))
        self._residents = Residents(module, self.devices, force_copies=force_copies)
        self._pace = Pace(0.0)
        self._workers: list[Worker] = []
        self._crew = weakref.finalize(self, _stop, self._workers)
        self._crew.atexit = False  # daemon threads need no farewell
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __len__(self) -> int:
        return len(self.devices)

    def run(self, call: Callable[[nn.Module, Any], R], parts: Sequence[Any]) -> list[R]:
        """Return ``call(replica, part)`` for each part, run on its device, all at once.

        Fewer parts than devices use the first devices only. If calls raise, the others are waited
        for; then the first error is raised, with a note that names the part and the device.

        Args:
            call: What to do with a replica and a part.
            parts: One part per device that takes part.

        Raises:
            ConfigError: There are no parts, or more than devices.
            ModelError: The module cannot be replicated as it is, or a replica's own forward calls
                this method.
        """
        count = len(parts)
        if count == 1:
            self._residents.note_run_alone()
            return [self._run_first(call, parts[0])]
        if not 0 < count <= len(self.devices):
            msg = f"expected 1 to {len(self.devices)} parts, one per device, got {count}"
            raise ConfigError(msg)
        self._acquire()
        try:
            return self._run_all(call, parts)
        finally:
            self._owner = None
            self._lock.release()

    def compile(self, **options: Any) -> None:
        """Compile the module in place, and every replica by itself.

        Where ``module.compile()`` is called instead, the other replicas run as they were written: torch
        does not keep the options.

        Args:
            **options: As :func:`torch.compile` takes them.
        """
        self.module.compile(**options)
        self._residents = self._fresh_residents(options)

    def refresh(self) -> None:
        """Copy everything at the next call, whatever the version counters say."""
        self._residents.refresh()

    # -- the machinery ----------------------------------------------------------------------------

    def _run_all(self, call: Callable[[nn.Module, R], Any], parts: Sequence[Any]) -> list[Any]:
        count = len(parts)
        caller = Caller.capture(self.devices[:count], self._types)
        replicas = self._residents.prepare(count, grad=caller.grad and not caller.inference)
        streams = Streams(self.devices[:count])
        workers = self._hire(count - 1)
        outcomes = [Outcome() for _ in parts]
        is_short = self._pace.is_short
        try:
            for i, worker in enumerate(workers, start=1):
                run = partial(caller.call, call, replicas[i], parts[i], device=self.devices[i])
                give = worker.offer if is_short else worker.start
                give(partial(_in, streams.of(i), run))
            began = time.perf_counter()
            with streams.of(0):
                outcomes[0].result = self._run_first(call, parts[0])
            if not is_short:
                self._pace.note((count - 1) * (time.perf_counter() - began))
        except BaseException as error:  # noqa: BLE001 - raised again when the others are done
            outcomes[0].error = error
        if is_short:
            self._run_offered(workers, outcomes)
        self._await(workers, outcomes)
        streams.close()
        raise_first(outcomes, self.devices)
        return [o.result for o in outcomes]

    def _run_first(self, call: Callable[[nn.Module, Any], R], part: Any) -> R:
        device = self.devices[0]
        if device.type == "cpu":
            return call(self.module, part)
        with on_device(device):
            return call(self.module, part)

    def _run_offered(self, workers: list[Worker], outcomes: list[Outcome]) -> None:
        """Run here what no thread has found; after an interrupt, let it be."""
        began = time.perf_counter()
        for worker, outcome in zip(workers, outcomes[1:], strict=True):
            task = worker.take_back() if worker.busy else None
            if task is not None and not any(o.interrupted for o in outcomes):
                try:
                    outcome.result = task()
                except BaseException as error:  # noqa: BLE001 - as that of part 0
                    outcome.error = error
        self._pace.note(time.perf_counter() - began)

    def _await(self, workers: list[Worker], outcomes: list[Outcome]) -> None:
        """Wait for the workers, whatever interrupts it once; a second time gives them up."""
        interrupted = outcomes[0].interrupted
        for worker, outcome in zip(workers, outcomes[1:], strict=True):
            while worker.busy:
                try:
                    worker.wait()
                except BaseException as error:  # KeyboardInterrupt, as a rule
                    if interrupted:
                        self._abandon()
                        raise
                    interrupted = True
                    outcomes[0].error = error
                else:
                    outcome.result, outcome.error = worker.take()

    def _abandon(self) -> None:
        """Leave busy threads to themselves: what they use is not used again."""
        _stop(self._workers)
        self._residents = self._fresh_residents(self._residents.compile_options)

    def _fresh_residents(self, compile_options: Mapping[str, Any] | None) -> Residents:
        residents = Residents(self.module, self.devices, force_copies=self._force_copies)
        residents.compile_options = compile_options
        return residents

    def _hire(self, count: int) -> list[Worker]:
        if self._pid != os.getpid():  # a forked process has no threads but the one that forked
            self._pid = os.getpid()
            self._workers.clear()
        if any(worker.busy for worker in self._workers):
            self._abandon()  # an interrupt came where it could not be waited out
        for number in range(len(self._workers) + 1, count + 1):
            self._workers.append(Worker(f"tp-replica-{number}-{self.devices[number]}"))
            if number == 1 and self._types == ("cpu",):
                self._pace = Pace(self._workers[0].round_trip_s())
        return self._workers[:count]

    def _acquire(self) -> None:
        """Take the replicas for one call; another thread's call is waited for."""
        if self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            return
        here = threading.get_ident()
        if here == self._owner or any(w.thread.ident == here for w in self._workers):
            msg = (
                "the module's own forward called its replicas again: that would wait for itself; "
                "call the plain module inside of forward"
            )
            raise ModelError(msg)
        self._lock.acquire()
        self._owner = here

    # -- copies and pickles -----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replicas":
        module = copy.deepcopy(self.module, memo)
        return Replicas(module, self.devices, force_copies=self._force_copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Replicas, force_copies=self._force_copies), (self.module, self.devices)


def _in(context: AbstractContextManager[Any], run: Callable[[], R]) -> R:
    with context:
        return run()


def _stop(workers: list[Worker]) -> None:
    """End the threads; a module-level function, so that nothing keeps the replicas alive."""
    for worker in workers:
        worker.stop()
    workers.clear()
