"""What a worker runs: made from a runner class, a function, or the stages of a pipeline."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tp_runner._batching import Batching, refuse_async
from tp_runner._cfg import copy_cfg
from tp_runner.errors import ItemError

__all__ = ["FILTER", "FLAT_MAP", "MAP", "ClassProgram", "FunctionProgram", "Stage", "StagesProgram"]


class ClassProgram:
    """The producer's side of a runner class.

    Called with its device in each worker, it returns what is applied to each item; the ``close``
    attribute of that is called at the end.

    Attributes:
        cfg: The configuration.
        is_own: Whether it is nobody else's: in a process of its own it need not be copied.
    """

    def __init__(self, producer: type, cfg: Any) -> None:
        self._producer: Any = producer
        self.cfg = cfg
        self.is_own = False

    @property
    def works(self) -> list[Any]:
        """The functions that workers call."""
        producer = self._producer
        return [producer.producer_init, producer.producer_work, producer.producer_end]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_own=True)

    def __call__(self, device: str) -> Callable[[Any], Any]:
        """Start: ``producer_init``."""
        cfg = self.cfg if self.is_own else copy_cfg(self.cfg)
        self._producer.producer_init(device, cfg)
        work = functools.partial(self._producer.producer_work, device, cfg)
        work.close = functools.partial(self._producer.producer_end, device, cfg)  # type: ignore[attr-defined]  # partial objects take attributes
        return work


class FunctionProgram:
    """A plain function, and what makes its state."""

    def __init__(self, function: Callable[..., Any], init: Callable[[str], Any] | None) -> None:
        self._function = function
        self._init = init

    @property
    def works(self) -> list[Any]:
        """The functions that workers call."""
        return [self._function, self._init]

    def __call__(self, device: str) -> Callable[[Any], Any]:
        """Start: make the state, if there is one."""
        if self._init is None:
            return self._function
        return functools.partial(self._function, self._init(device))


MAP, FLAT_MAP, FILTER = "map", "flat_map", "filter"


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a pipeline.

    Attributes:
        name: What it is called in tables and errors.
        kind: ``MAP``, ``FLAT_MAP`` or ``FILTER``: how many results an item has.
        function: The work.
        init: Makes a worker's state, given its device.
        batching: How items are put together.
        devices: The devices of workers of its own; ``None`` for those that stages share.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    init: Callable[[str], Any] | None
    batching: Batching | None
    devices: tuple[str, ...] | None

    def __post_init__(self) -> None:
        refuse_async(self.function)
        refuse_async(self.init)


class StagesProgram:
    """The work of one or more stages; an item says which of them it is for."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages

    @property
    def works(self) -> list[Any]:
        """The functions that workers call."""
        return [work for stage in self._stages.values() for work in (stage.function, stage.init)]

    def __call__(self, device: str) -> Callable[[tuple[int, Any]], list[Any]]:
        """Start: make the states."""
        works = {place: _bound(stage, device) for place, stage in self._stages.items()}

        def work(payload: tuple[int, Any]) -> list[Any]:
            place, item = payload
            return works[place](item)

        return work


def _bound(stage: Stage, device: str) -> Callable[[Any], list[Any]]:
    """Return what makes the list of results of an item, or of a list of items that are a batch."""
    function: Callable[[Any], Any] = stage.function
    if stage.init is not None:
        state, with_state = stage.init(device), stage.function
        function = lambda item: with_state(state, item)  # noqa: E731 - it is the same as the one above
    batching = stage.batching

    def work(item: Any) -> list[Any]:
        if isinstance(item, ItemError):
            return [item]  # what failed before passes by
        if stage.kind == FLAT_MAP:
            return list(function(item))
        if stage.kind == FILTER:
            return [item] if function(item) else []
        return [function(item)]

    def work_on_batch(items: list[Any]) -> list[Any]:
        good = [item for item in items if not isinstance(item, ItemError)]
        results = iter(batching.split(function(batching.join(good)), len(good)) if batching and good else ())
        return [item if isinstance(item, ItemError) else next(results) for item in items]

    return work if batching is None else work_on_batch
