"""The engines of this package, and opening a pool on one of them or on a plugin's.

Nothing here imports torch; :mod:`tp_runner._plugin` shows the same engines to tp_core's registry.
"""

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._batching import refuse_async
from tp_runner._devices import require_processes
from tp_runner._options import Settings, make_settings
from tp_runner._scheduling._pool import RunnerPool
from tp_runner._stream import OpenRun, ResultStream

__all__ = ["ENGINES", "EngineSpec", "PoolFactory", "has_copies", "open_pool"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of this package.

    Attributes:
        name: What users call it.
        fleet: Where its fleet's class is, as ``module:class``; imported when it is used.
        score: How well it fits, from 0 to 100, where nobody has asked for one.
        summary: What its workers are, in a sentence.
        remedy: What fits better, if something does.
        unfit: The options that mean nothing to it, and why.
    """

    name: str
    fleet: str
    score: int
    summary: str
    remedy: str = ""
    unfit: Mapping[str, str] = field(default_factory=dict)


_RAY_ONLY = "only Ray places workers by them"
_PROCESSES_ONLY = "only processes are replaced"
_RAY = dict.fromkeys(("min_workers", "placement", "resources"), _RAY_ONLY)
_SURROUNDINGS = ("cpus", "env")
_NOT_REPLACED = {"max_items_per_worker": _PROCESSES_ONLY, "max_memory_per_worker": _PROCESSES_ONLY}

ENGINES = {
    spec.name: spec
    for spec in (
        EngineSpec(
            "inline",
            "tp_runner._workers._thread:InlineFleet",
            10,
            "one item after the other, in the caller's thread",
            unfit=_RAY
            | _NOT_REPLACED
            | dict.fromkeys(_SURROUNDINGS, "there is no worker; it is the caller's own process")
            | {
                "log_level": "there is no worker",
                "max_restarts": "there is no worker",
                "max_wait_s": "the input is read in the caller's thread",
                "preload": "there is no worker",
                "start_method": "there is no worker",
                "start_timeout_s": "the caller's own thread cannot be stopped",
                "threads": "there is no worker",
                "timeout_s": "the caller's own thread cannot be stopped",
            },
        ),
        EngineSpec(
            "process",
            "tp_runner._workers._process._fleet:ProcessFleet",
            80,
            "one process for each device",
            unfit=_RAY,
        ),
        EngineSpec(
            "ray",
            "tp_runner._workers._ray._fleet:RayFleet",
            20,
            "one actor on a Ray cluster for each device",
            unfit=_NOT_REPLACED
            | dict.fromkeys(("preload", "start_method"), "Ray starts the workers")
            | {"cpus": "Ray places the workers; resources={'num_cpus': 2} says how many cores one takes"},
        ),
        EngineSpec(
            "thread",
            "tp_runner._workers._thread:ThreadFleet",
            40,
            "one thread for each device; they share one interpreter",
            remedy="engine='process' for work in Python",
            unfit=_RAY
            | _NOT_REPLACED
            | dict.fromkeys(_SURROUNDINGS, "threads share those of their process")
            | {
                "log_level": "records of threads are the parent's own",
                "max_restarts": "threads do not die",
                "preload": "threads share what is imported",
                "start_method": "threads are not started by one",
                "threads": "they all share the process's own setting",
                "timeout_s": "a thread cannot be stopped",
            },
        ),
    )
}


class PoolFactory:
    """Everything that is needed to open a pool, checked.

    Args:
        engine: The name of an engine, ours or a plugin's.
        program: What the workers run; called with its device in each of them.
        devices: One for each worker.
        options: What was given by name.

    Raises:
        ConfigError: An option is unknown, has a wrong value, or means nothing to this engine.
    """

    def __init__(
        self, engine: str, program: Any, devices: tuple[str, ...], options: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._program = program
        self._devices = devices
        self._options = options
        self._settings: Settings | None = None
        if engine in ENGINES:
            self._settings = make_settings(engine, len(devices), options, ENGINES[engine].unfit)
        else:
            self._plugin_engine = _find_engine(engine)
        for work in program.works:
            refuse_async(work)
        if has_copies(engine, devices):
            from tp_runner._workers._item import warn_of_copied_generators

            warn_of_copied_generators(
                [*program.works, options.get("collate")], getattr(program, "cfg", None), stacklevel=3
            )

    def open(self, *, wait: bool = True) -> Any:
        """Start the workers; ``wait`` until they are ready, as :class:`RunnerPool` does."""
        if self._settings is not None:
            return open_pool(ENGINES[self._engine], self._program, self._devices, self._settings, wait=wait)
        import torch

        devices = [torch.device(device) for device in self._devices]
        given = {name: value for name, value in self._options.items() if value is not None}
        ordered = given.pop("ordered", True)
        pool = self._plugin_engine.open(self._program, devices, options=given)
        return PluginPoolAdapter(pool, self._engine, ordered=ordered)


def has_copies(engine: str, devices: tuple[str, ...]) -> bool:
    """Whether there are several workers, each with a copy of what the work refers to."""
    return len(devices) > 1 and engine in {"process", "ray"}


def open_pool(
    spec: EngineSpec, program: Any, devices: tuple[str, ...], settings: Settings, *, wait: bool = True
) -> RunnerPool:
    """Start workers on an engine of this package."""
    if spec.name == "process":
        require_processes()
    settings = dataclasses.replace(settings, entropy=int.from_bytes(os.urandom(8)))
    module, _, name = spec.fleet.partition(":")
    fleet = getattr(importlib.import_module(module), name)
    return RunnerPool(fleet(program, devices, settings), settings, wait=wait)


def _find_engine(name: str) -> Any:
    from tp_core.plugins import registry

    for contribution in registry.engines():
        if contribution.item.name == name:
            return contribution.item
    registry.require(name)
    known = ", ".join(repr(contribution.item.name) for contribution in registry.engines())
    msg = f"no engine is called {name!r}; installed: {known or 'none'}"
    raise ConfigError(msg)


class PluginPoolAdapter:
    """A plugin's pool, used as one of our own as far as the contract goes: it has ``run`` and ``close``.

    Args:
        pool: The pool of an engine that a plugin brings.
        engine: The name of that engine.
        ordered: Whether results come in the order of the items.
    """

    def __init__(self, pool: Any, engine: str, *, ordered: bool) -> None:
        self._pool = pool
        self._engine = engine
        self._ordered = ordered
        self.closed = False

    def run(self, items: Iterable[Any]) -> ResultStream[Any]:
        """Return an iterator over the results."""
        return ResultStream(self.open_run(items))

    def open_run(self, items: Iterable[Any]) -> OpenRun:
        """Return the results as lists of one, and what ends them."""

        def steps() -> Generator[list[Any], None, None]:
            for result in self._pool.run(items, ordered=self._ordered):
                yield [result]

        def stats() -> Any:
            return self.stats()  # which such a pool does not have

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
        """End the workers."""
        self.close()

    drop = stop

    def __getattr__(self, name: str) -> Any:
        # What remains is what our own pools have beyond the contract.
        msg = f"engine {self._engine!r} cannot do {name!r}; the engines of tp-runner can"
        raise ConfigError(msg)
