"""Chunks of items at work, and the programs of workers: runner classes, functions or stages."""

import functools
import signal
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tp_runner._batching import NOT_AWAITED, Batching, refuse_async, separate
from tp_runner._cfg import copy_cfg
from tp_runner._workers._failure import Failure
from tp_runner._workers._item import Task, seed_generators
from tp_runner.errors import ItemError

# -- Chunks of items --------------------------------------------------------------------------

IDLE = -1
"""The first word of a worker's board when it works on no chunk."""

ENDING = -2
"""The same word while the worker ends, at the parent's request."""

_UNAWAITED = (types.CoroutineType, types.AsyncGeneratorType)


def end_work(work: Any) -> Any:
    """Call the ``close`` attribute of a worker's work, where it has one, and return its value."""
    return getattr(work, "close", lambda: None)()


def run_chunk(work: Callable[[Any], Any], items: list[Any], task: Task) -> tuple[list[Any], bool]:
    """Apply ``work`` to each item; return the results and whether some are failures.

    Args:
        work: The function of an item.
        items: The items of the chunk.
        task: The worker's task, which has begun with this chunk.
    """
    try:
        if task.is_cancelled():  # nobody will look at the results
            return [None] * len(items), False
        if task.batching is not None:
            return _run_batches(work, items, task, task.batching)
        return _run_items(work, items, task)
    finally:
        task.end()


def _run_items(work: Callable[[Any], Any], items: list[Any], task: Task) -> tuple[list[Any], bool]:
    results: list[Any] = []
    append = results.append
    failed = False
    board, seed, start = task.board, task.global_seed, task.start
    # Without a limit and a seed only the place is noted: this loop is the hot path of small items.
    is_plain = task.timeout_s is None and seed is None
    numbered = enumerate(items)
    while True:
        try:
            if is_plain:
                for board[1], item in numbered:
                    append(work(item))
            else:
                now = time.monotonic_ns
                for board[1], item in numbered:
                    if seed is not None:
                        seed_generators(seed, start + board[1])
                    board[2] = now()
                    append(work(item))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            append(Failure.of(error))
            failed = True
            continue  # with the item after it: the iterator remembers where it was
        return results, _refuse_unawaited(results, failed=failed)


def _run_batches(
    work: Callable[[Any], Any], items: list[Any], task: Task, batching: Batching
) -> tuple[list[Any], bool]:
    results: list[Any] = []
    failed = False
    board, seed = task.board, task.global_seed
    for start in range(0, len(items), batching.size):
        part = items[start : start + batching.size]
        if seed is not None:
            seed_generators(seed, task.start + start)
        board[1], board[2] = start, time.monotonic_ns()
        try:
            answer = work(batching.join(part))
            if type(answer) in _UNAWAITED:
                raise _not_awaited(answer)
            results += separate(answer, len(part))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            results += [Failure.of(error)] * len(part)
            failed = True
    return results, failed


def _refuse_unawaited(results: list[Any], *, failed: bool) -> bool:
    """Replace coroutines and async generators by failures; return whether there are failures now."""
    # The last result stands for all, as work is of one kind; with failures each one is checked.
    if not results or not (failed or type(results[-1]) in _UNAWAITED):
        return failed
    for place, result in enumerate(results):
        if type(result) in _UNAWAITED:
            results[place] = Failure.of(_not_awaited(result), skip_frames=0)
            failed = True
    return failed


def _not_awaited(result: Any) -> TypeError:
    if type(result) is types.CoroutineType:
        result.close()  # or Python warns that it was never awaited
    return TypeError(NOT_AWAITED.format(name=result.__qualname__))


def _is_interrupt(error: BaseException) -> bool:
    """Return whether an interrupt is for this program; elsewhere the work itself has raised it."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as in a worker process
    )


# -- Programs ---------------------------------------------------------------------------------


class ClassProgram:
    """The producer's side of a runner class.

    Called with its device in each worker, it returns the function of an item. The worker calls the
    ``close`` attribute of that function at its end.

    Attributes:
        cfg: The configuration.
        is_own: Whether this worker alone has it: then the configuration need not be copied.
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
    """The program of a plain function, with a function that makes its state."""

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
        name: Its name in tables and errors.
        kind: ``MAP``, ``FLAT_MAP`` or ``FILTER``: how many results an item has.
        function: The work.
        init: Makes a worker's state, given its device.
        batching: How items are put together.
        devices: The devices of workers of its own; ``None`` for the shared workers.
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
    """The program of one or more stages; an item names its stage."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages

    @property
    def works(self) -> list[Any]:
        """The functions that workers call."""
        return [work for stage in self._stages.values() for work in (stage.function, stage.init)]

    def __call__(self, device: str) -> Callable[[tuple[int, Any]], list[Any]]:
        """Start: make the states."""
        works = {place: _stage_work(stage, device) for place, stage in self._stages.items()}

        def work(payload: tuple[int, Any]) -> list[Any]:
            place, item = payload
            return works[place](item)

        return work


def _stage_work(stage: Stage, device: str) -> Callable[[Any], list[Any]]:
    """Return a function that makes the list of results of an item, or of a batch of items."""
    function: Callable[[Any], Any] = stage.function
    if stage.init is not None:
        state, with_state = stage.init(device), stage.function
        function = lambda item: with_state(state, item)  # noqa: E731 - it is the same as the one above
    batching = stage.batching

    def work(item: Any) -> list[Any]:
        if isinstance(item, ItemError):
            return [item]  # an item that failed before passes
        if stage.kind == FLAT_MAP:
            return list(function(item))
        if stage.kind == FILTER:
            return [item] if function(item) else []
        return [function(item)]

    def work_on_batch(items: list[Any]) -> list[Any]:
        good = [item for item in items if not isinstance(item, ItemError)]
        results = iter(separate(function(batching.join(good)), len(good)) if batching and good else ())
        return [item if isinstance(item, ItemError) else next(results) for item in items]

    return work if batching is None else work_on_batch
