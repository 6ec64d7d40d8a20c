"""The engines of this package, the search for other engines, and the opening of a pool."""

import contextlib
import os
import sys
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core.errors import ConfigError
from tp_core.plugins import Engine

from tp_runner._options import (
    START_TIMEOUT_S,
    Settings,
    check_truth,
    devices_of_workers,
    make_settings,
    refuse_async,
    require_processes,
)
from tp_runner._stream import OpenRun
from tp_runner._workers._fleet import Fleet
from tp_runner._workers._item import warn_of_copied_generators
from tp_runner.errors import RunnerClosedError

if TYPE_CHECKING:  # nothing here imports torch: runners on the CPU need none
    import torch
    from tp_core.plugins import Verdict

    from tp_runner._scheduling._pool import RunnerPool


class FleetEngine(Engine):
    """An engine with a :class:`Fleet` of workers: this package schedules, retries and counts.

    Attributes:
        score: How well it fits, from 0 to 100, where no engine is named.
        summary: A sentence on its workers.
        remedy: A better choice, if there is one.
        unfit: The options that mean nothing to it, and why.
        is_remote: Whether its workers may be on other machines, with devices that are not visible here.
        copies_work: Whether each worker has a copy of the objects that the work refers to.
        start_timeout_s: How many seconds a start may take by default; ``None`` for any number.
    """

    score: ClassVar[int]
    summary: ClassVar[str]
    remedy: ClassVar[str] = ""
    unfit: ClassVar[Mapping[str, str]] = {}
    is_remote: ClassVar[bool] = False
    copies_work: ClassVar[bool] = False
    start_timeout_s: ClassVar[float | None] = START_TIMEOUT_S

    @abstractmethod
    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        """Return the workers, whose starts may have begun; modules that they need are imported here."""

    def assess(self, devices: "Sequence[torch.device]") -> "Verdict":
        """Fit for any devices, better or worse."""
        from tp_core.plugins import Verdict

        del devices
        return Verdict.fits(self.score, self.summary, remedy=self.remedy)

    def open(
        self, worker: Any, devices: "Sequence[torch.device]", *, options: Mapping[str, Any]
    ) -> "RunnerPool":
        """Start one worker per device; ``worker(device)`` returns what is applied to each item."""
        names = tuple(str(device) for device in devices)
        return self.open_pool(worker, names, self.make_settings(len(names), options))

    def make_settings(self, n_workers: int, options: Mapping[str, Any]) -> Settings:
        """Check options that were given by name; fill in the rest."""
        return make_settings(self.name, n_workers, options, self.unfit, start_timeout_s=self.start_timeout_s)

    def open_pool(
        self, program: Any, devices: tuple[str, ...], settings: Settings, *, wait: bool = True
    ) -> "RunnerPool":
        """Start the workers; ``wait`` until they are ready, as ``RunnerPool`` does."""
        settings = settings._replace(entropy=int.from_bytes(os.urandom(8)))
        fleet = self.make_fleet(program, devices, settings)
        try:
            # Only now: processes may be starting by now, and go on while this is imported.
            from tp_runner._scheduling._pool import RunnerPool

            return RunnerPool(fleet, settings, wait=wait)
        except BaseException:
            fleet.close(timeout_s=0.0)
            raise


_RAY = dict.fromkeys(("min_workers", "placement", "resources"), "only Ray places workers by them")
_NOT_REPLACED = dict.fromkeys(
    ("max_items_per_worker", "max_memory_per_worker"), "only processes are replaced"
)
_NOT_COPIED = {"max_bytes": "items and results are handed over as they are, and take no bytes on the way"}
_SURROUNDINGS = ("cpus", "env")


class InlineEngine(FleetEngine):
    name = "inline"
    score = 10
    summary = "one item after the other, in the caller's thread"
    unfit: ClassVar[Mapping[str, str]] = {
        **_RAY,
        **_NOT_REPLACED,
        **_NOT_COPIED,
        **dict.fromkeys(_SURROUNDINGS, "there is no worker; it is the caller's own process"),
        **dict.fromkeys(
            ("log_level", "max_restarts", "preload", "start_method", "threads"), "there is no worker"
        ),
        **dict.fromkeys(("start_timeout_s", "timeout_s"), "the caller's own thread cannot be stopped"),
        "max_wait_s": "the input is read in the caller's thread",
    }

    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        from tp_runner._workers._thread import InlineFleet

        return InlineFleet(program, devices, settings)


class ThreadEngine(FleetEngine):
    name = "thread"
    score = 40
    summary = "one thread for each device; they share one interpreter"
    remedy = "engine='process' for work in Python"
    unfit: ClassVar[Mapping[str, str]] = {
        **_RAY,
        **_NOT_REPLACED,
        **_NOT_COPIED,
        **dict.fromkeys(_SURROUNDINGS, "threads share those of their process"),
        "log_level": "records of threads are the parent's own",
        "max_restarts": "threads do not die",
        "preload": "threads share what is imported",
        "start_method": "threads are not started by one",
        "threads": "they all share the process's own setting",
        "timeout_s": "a thread cannot be stopped",
    }

    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        from tp_runner._workers._thread import ThreadFleet

        return ThreadFleet(program, devices, settings)


class ProcessEngine(FleetEngine):
    name = "process"
    score = 80
    summary = "one process for each device"
    unfit: ClassVar[Mapping[str, str]] = _RAY
    copies_work = True

    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        if sys.is_finalizing():  # then nothing can be imported or started: in a __del__ at the very end, say
            msg = "Python is ending, and starts no processes any more; have the work done before that"
            raise RunnerClosedError(msg)
        require_processes()
        from tp_runner._workers._processes import ProcessFleet  # imports what Windows lacks

        return ProcessFleet(program, devices, settings)


ENGINES: dict[str, FleetEngine] = {
    engine.name: engine for engine in (InlineEngine(), ProcessEngine(), ThreadEngine())
}


def find_engine(name: str) -> Engine:
    if name in ENGINES:  # the registry would look for plugins, which takes longer than to start threads
        return ENGINES[name]
    from tp_core.plugins import registry

    for contribution in registry.engines():
        if contribution.item.name == name:
            engine: Engine = contribution.item
            return engine
    registry.require(name)
    if name == "ray":
        msg = "engine 'ray' is in a distribution of its own; pip install 'tp-runner[ray]'"
        raise ConfigError(msg)
    names = ", ".join(repr(contribution.item.name) for contribution in registry.engines())
    msg = f"no engine is called {name!r}; installed: {names or 'none'}"
    raise ConfigError(msg)


def worker_devices(engine: str, devices: Any, n_workers: int | None = None) -> tuple[str, ...]:
    is_remote = getattr(find_engine(engine), "is_remote", False)
    return devices_of_workers(devices, n_workers=n_workers, elsewhere=is_remote)


class PoolFactory:
    """The checked arguments of a pool, which it opens any number of times."""

    def __init__(
        self, engine: str, program: Any, devices: tuple[str, ...], options: Mapping[str, Any]
    ) -> None:
        self._engine = find_engine(engine)
        self._program = program
        self._devices = devices
        self._options = options
        # whether there are several workers, each with a copy of the work's objects
        self.has_copies = len(devices) > 1 and getattr(self._engine, "copies_work", False)
        if isinstance(self._engine, FleetEngine):
            self._settings = self._engine.make_settings(len(devices), options)
        for work in program.works:
            refuse_async(work)
        # At the end of Python no process is started, and the search could import nothing.
        if self.has_copies and not sys.is_finalizing():
            works = [*program.works, options.get("collate")]
            warn_of_copied_generators(works, getattr(program, "cfg", None), stacklevel=3)

    def open(self, *, wait: bool = True) -> Any:
        """Start the workers; ``wait`` until they are ready, as ``RunnerPool`` does."""
        if isinstance(self._engine, FleetEngine):
            return self._engine.open_pool(self._program, self._devices, self._settings, wait=wait)
        import torch

        devices = [torch.device(device) for device in self._devices]
        options = {name: value for name, value in self._options.items() if value is not None}
        check_truth(options, "ordered")
        ordered = options.pop("ordered", True)
        pool = self._engine.open(self._program, devices, options=options)
        return PluginPoolAdapter(pool, self._engine.name, ordered=ordered)


class PluginPoolAdapter:
    """A plugin's pool behind the methods of our own pools: by contract it has ``run`` and ``close``."""

    def __init__(self, pool: Any, engine: str, *, ordered: bool) -> None:
        self._pool = pool
        self._engine = engine
        self._ordered = ordered
        self.closed = False

    def open_run(self, items: Iterable[Any]) -> OpenRun:
        def steps() -> Generator[list[Any], None, None]:
            for result in self._pool.run(items, ordered=self._ordered):
                yield [result]

        def stats() -> Any:
            return self.stats()  # __getattr__ below refuses it

        generator = steps()

        def cancel(kill_after_s: float | None) -> None:
            if kill_after_s is not None:
                msg = f"engine {self._engine!r} cannot kill workers, as kill_after_s={kill_after_s!r} asks"
                raise ConfigError(msg)
            end()

        def end() -> None:
            with contextlib.suppress(ValueError):  # another thread is in it
                generator.close()

        return OpenRun(generator, end, cancel, stats)

    def close(self, *, timeout_s: float | None = None) -> None:
        """End the workers, in whatever time it takes."""
        del timeout_s
        if not self.closed:
            self.closed = True
            self._pool.close()

    def stop(self) -> None:
        self.close()

    drop = stop

    def __getattr__(self, name: str) -> Any:
        # Only names beyond the contract come here, which our own pools have.
        msg = f"engine {self._engine!r} cannot do {name!r}; the engines of tp-runner can"
        raise ConfigError(msg)
