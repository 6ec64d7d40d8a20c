"""Streams over the results of a pool, plain or with a progress bar; `map`, which makes a pool of its own."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from tp_core.errors import ConfigError
from tp_core.output import shows_progress

from tp_runner._engines import PoolFactory, worker_devices
from tp_runner._options import ItemOptions, RunnerOptions
from tp_runner._stream import OpenRun, ResultStream
from tp_runner._workers._work import FunctionProgram
from tp_runner.errors import ItemError, RunnerClosedError

if TYPE_CHECKING:
    from tp_core import DeviceSpec
    from tp_core.output import Progress

    from tp_runner._scheduling._pool import RunnerPool
    from tp_runner._scheduling._source import MapStyle


T = TypeVar("T")
R = TypeVar("R")
State = TypeVar("State")


def stream(pool: "RunnerPool", items: Any, *, progress: bool) -> ResultStream[Any]:
    """Return an iterator over the results of a run on a pool."""
    return ResultStream(_open_run(pool, items, progress=progress))


def _open_run(pool: "RunnerPool", items: Any, *, progress: bool) -> OpenRun:
    run = pool.open_run(items)
    if not progress:
        return run
    from tp_runner._progress import with_progress
    from tp_runner._scheduling._source import length_of

    chunks = with_progress(run.chunks, length_of(items), pool)
    return run._replace(chunks=chunks)


@overload
def map(
    function: Callable[[T], R],
    items: "Iterable[T] | MapStyle[T]",
    *,
    devices: "DeviceSpec" = None,
    n_workers: int | None = None,
    ordered: bool = True,
    init: None = None,
    queue_scale: float | None = None,
    engine: str = "process",
    progress: "Progress" = "auto",
    on_error: Literal["raise"] | None = None,
    **options: Unpack[ItemOptions],
) -> ResultStream[R]: ...
@overload
def map(
    function: Callable[[State, T], R],
    items: "Iterable[T] | MapStyle[T]",
    *,
    init: Callable[[str], State],
    devices: "DeviceSpec" = None,
    n_workers: int | None = None,
    ordered: bool = True,
    queue_scale: float | None = None,
    engine: str = "process",
    progress: "Progress" = "auto",
    on_error: Literal["raise"] | None = None,
    **options: Unpack[ItemOptions],
) -> ResultStream[R]: ...
@overload
def map(
    function: Callable[..., Any],
    items: "Iterable[Any] | MapStyle[Any]",
    *,
    batch: int,
    collate: Callable[[list[Any]], Any] | None = None,
    max_wait_s: float | None = None,
    on_error: Literal["raise", "return"] | None = None,
    devices: "DeviceSpec" = None,
    n_workers: int | None = None,
    ordered: bool = True,
    init: Callable[[str], Any] | None = None,
    queue_scale: float | None = None,
    engine: str = "process",
    progress: "Progress" = "auto",
    **options: Unpack[ItemOptions],
) -> ResultStream[Any]: ...
@overload
def map(
    function: Callable[..., R],
    items: "Iterable[Any] | MapStyle[Any]",
    *,
    on_error: Literal["return"],
    devices: "DeviceSpec" = None,
    n_workers: int | None = None,
    ordered: bool = True,
    init: Callable[[str], Any] | None = None,
    queue_scale: float | None = None,
    engine: str = "process",
    progress: "Progress" = "auto",
    **options: Unpack[ItemOptions],
) -> ResultStream[R | ItemError]: ...
def map(
    function: Callable[..., Any],
    items: Any,
    *,
    devices: "DeviceSpec" = None,
    n_workers: int | None = None,
    ordered: bool = True,
    init: Callable[[str], Any] | None = None,
    queue_scale: float | None = None,
    engine: str = "process",
    progress: "Progress" = "auto",
    **options: Unpack[RunnerOptions],
) -> ResultStream[Any]:
    """Apply a function to each item on several workers; return a lazy iterator over the results.

    Args:
        function: Applied to each item; with ``init``, to the worker's state and the item; with
            ``batch``, to batches of items.
        items: An iterable, which is read lazily, or a dataset that has a length and places but no iterator,
            such as those of ``torch.utils.data``.
        devices: As for a runner: devices, ``"auto"``, or a number of CPU workers; by default one CPU
            worker on each core.
        n_workers: How many CPU workers, in place of ``devices``.
        ordered: Whether results come in the order of the items or as they come.
        init: Makes the state of a worker, given its device as a string.
        queue_scale: The most items on their way for each worker; by default as few as keep it busy.
        engine: What the workers are: ``"process"``, ``"thread"``, ``"inline"``, ``"ray"`` or the name of an
            engine that a plugin brings.
        progress: Whether to show a progress bar; "auto" on a terminal or in a notebook.
        options: As for a runner: ``batch``, ``on_error``, ``max_retries``, ``timeout_s``, ...

    Returns:
        An iterator that starts the workers at the first request for a result, and ends them when it is
        exhausted, closed or dropped. A request raises ``WorkerError`` where the work on an item or ``init``
        raised, and ``WorkerDiedError`` where a worker died and was not started again. It raises
        ``ItemTimeoutError`` where an item took longer than ``timeout_s``, and ``NotPicklableError`` where
        the function, an item or a result cannot travel between processes.

    Raises:
        ConfigError: An option is unknown or has a wrong value, or there is no function, or no items.
        DeviceError: A device does not exist here.

    Example:
        >>> list(map(abs, [-2, 3], n_workers=2, engine="thread"))
        [2, 3]
    """
    if not callable(function):
        msg = f"map() takes a function, and then the items, got {type(function).__name__}: {function!r:.80}"
        raise ConfigError(msg)
    if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
        kind = type(items).__name__
        msg = f"map() takes items one by one from an iterable or a dataset, got {kind}: {items!r:.80}"
        raise ConfigError(msg)
    factory = PoolFactory(
        engine,
        FunctionProgram(function, init),
        worker_devices(engine, devices, n_workers),
        {**options, "ordered": ordered, "queue_scale": queue_scale},
    )
    opened: list[OpenRun] = []
    is_cancelled = False
    shows_bar = shows_progress(progress)

    def chunks() -> Generator[list[Any], None, None]:
        pool = factory.open(wait=False)
        timeout_s: float | None = 0.0
        try:
            run = _open_run(pool, items, progress=shows_bar)
            opened.append(run)
            if is_cancelled:  # by another thread, while the workers were starting
                run.cancel(None)
            yield from run.chunks
            timeout_s = None
        finally:
            pool.close(timeout_s=timeout_s)

    steps = cast("Generator[list[Any], None, None]", _clear_on_close(chunks()))

    def cancel(kill_after_s: float | None) -> None:
        nonlocal is_cancelled
        is_cancelled = True
        for run in opened:
            run.cancel(kill_after_s)

    def end() -> None:
        cancel(None)
        with contextlib.suppress(ValueError):  # another thread reads it, and notices
            steps.close()

    def stats() -> Any:
        for run in opened:
            return run.stats()
        msg = "no worker of this map has started: ask for a result first"
        raise RunnerClosedError(msg)

    return ResultStream(OpenRun(steps, end, cancel, stats))


def _clear_on_close(lists: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Yield the lists; when closed early, empty the one that was given last."""
    results: list[Any] = []
    try:
        for results in lists:
            yield results
    finally:
        results.clear()
        cast("Generator[list[Any], None, None]", lists).close()
