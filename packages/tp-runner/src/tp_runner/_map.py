"""Streams over the results of a pool, also asynchronous ones; `map`, which makes a pool of its own."""

import asyncio
import contextlib
import copy
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, Unpack, cast, overload

from tp_core.errors import TpError
from tp_core.internal import shows_progress

from tp_runner._engines import PoolFactory, worker_devices
from tp_runner._options import ItemOptions, RunnerOptions
from tp_runner._scheduling._pool import RunnerPool
from tp_runner._scheduling._source import MapStyle, length_of
from tp_runner._stream import OpenRun, ResultStream
from tp_runner._workers._work import FunctionProgram
from tp_runner.errors import ItemError, RunCancelledError, RunnerClosedError

if TYPE_CHECKING:
    from tp_core import DeviceSpec
    from tp_core.internal import Progress


_END_S = 5.0


class _OpenStream(NamedTuple):
    executor: ThreadPoolExecutor
    chunks: Generator[list[Any], None, None]
    cancel: Callable[[float | None], None]


class AsyncResultStream(AsyncIterator[Any]):
    """The results of one run of a pool, for ``async for``.

    The run begins when the first result is asked for. It has ended as soon as the stream is exhausted,
    closed or dropped, or the task that waits for a result is cancelled. (An
    asynchronous generator that is left early ends at a moment of the event loop's choice, or never.)

    Args:
        pool: Works on the items.
        items: What to work on.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self, pool: "RunnerPool", items: Iterable[Any] | AsyncIterable[Any], *, progress: bool
    ) -> None:
        self._pool = pool
        self._items = items
        self._progress = progress
        self._ready: deque[Any] = deque()
        self._open: _OpenStream | None = None
        self._has_ended = False
        self._fetching = asyncio.Lock()
        self._error: BaseException | None = None
        self._raised_in: weakref.WeakSet[Any] = weakref.WeakSet()  # the tasks that have got that error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._ready:
            # Tasks may share it, as threads share a stream: one fetches, and all of them take.
            async with self._fetching:
                if self._ready:
                    break
                if self._has_ended:
                    task = asyncio.current_task()
                    if self._error is None or task in self._raised_in:
                        raise StopAsyncIteration
                    self._raised_in.add(task)
                    raise copy.copy(self._error) if isinstance(self._error, TpError) else self._error
                results = await self._next_results()
                if results is None:
                    self._end()
                else:
                    self._ready.extend(results)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End the call; what was not asked for yet is dropped."""
        self._end()

    def __del__(self) -> None:
        self._end()

    async def _next_results(self) -> list[Any] | None:
        """Return neighboring results, or ``None`` at the end."""
        if self._open is None:
            self._open = self._begin()
        step = self._open.executor.submit(next, self._open.chunks, None)
        result = asyncio.wrap_future(step)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            self._open.cancel(None)
            result.add_done_callback(_forget_error)
            await _await_step(step, result)
            self._end_with(RunCancelledError("the task that waited for this stream was cancelled"))
            raise
        except BaseException as error:
            self._end_with(error)
            raise

    def _end_with(self, error: BaseException) -> None:
        """End; no other task must take the end of a stream that failed for that of its results."""
        self._error = error
        self._raised_in.add(asyncio.current_task())
        self._end()

    def _begin(self) -> _OpenStream:
        items, loop = self._items, asyncio.get_running_loop()
        source = _iterate_async(items, loop) if isinstance(items, AsyncIterable) else items
        run = self._pool.open_run(source)
        chunks = run.chunks
        if self._progress:
            from tp_runner._progress import with_progress

            chunks = with_progress(chunks, length_of(items), self._pool)
        return _OpenStream(ThreadPoolExecutor(1, thread_name_prefix="tp-runner-async"), chunks, run.cancel)

    def _end(self) -> None:
        self._has_ended = True
        self._ready.clear()
        begun, self._open = self._open, None
        if begun is None:
            return
        try:
            begun.chunks.close()
        except ValueError:  # an event loop that was closed has left the thread in it
            begun.cancel(None)
            begun.executor.submit(begun.chunks.close)
        begun.executor.shutdown(wait=False)


def _forget_error(result: "asyncio.Future[Any]") -> None:
    """Look at the error of a call that was cancelled, which asyncio would report otherwise."""
    if not result.cancelled():
        result.exception()


async def _await_step(step: "Future[Any]", result: "asyncio.Future[Any]") -> None:
    """Wait until a call that was cancelled has noticed it, whatever else is cancelled meanwhile."""
    with contextlib.suppress(TpError):
        try:
            await asyncio.shield(result)
        except asyncio.CancelledError:  # the event loop is about to end; whoever comes next needs the pool
            wait([step], _END_S)


def _iterate_async(items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """Yield the items of an asynchronous iterator, from another thread than its loop's."""
    iterator = aiter(items)

    async def pull() -> tuple[bool, Any]:
        try:
            return True, await anext(iterator)
        except StopAsyncIteration:
            return False, None

    while True:
        there, item = asyncio.run_coroutine_threadsafe(pull(), loop).result()
        if not there:
            return
        yield item


T = TypeVar("T")
R = TypeVar("R")
State = TypeVar("State")


def stream(pool: RunnerPool, items: Any, *, progress: bool) -> ResultStream[Any]:
    """Return an iterator over the results of a run on a pool."""
    return ResultStream(_open_run(pool, items, progress=progress))


def _open_run(pool: RunnerPool, items: Any, *, progress: bool) -> OpenRun:
    run = pool.open_run(items)
    if not progress:
        return run
    from tp_runner._progress import with_progress

    chunks = with_progress(run.chunks, length_of(items), pool)
    return run._replace(chunks=chunks)


@overload
def map(
    function: Callable[[T], R],
    items: Iterable[T] | MapStyle[T],
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
    items: Iterable[T] | MapStyle[T],
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
    items: Iterable[Any] | MapStyle[Any],
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
    items: Iterable[Any] | MapStyle[Any],
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
        An iterator that starts the workers when it is first asked and ends them when it is
        exhausted, closed or dropped. Asked for a result it raises ``WorkerError`` where the work on an item
        or ``init`` raised, ``WorkerDiedError`` where a worker died and was not started again,
        ``ItemTimeoutError`` where an item took longer than ``timeout_s``, and ``NotPicklableError`` where the
        function, an item or a result cannot travel between processes.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
        DeviceError: A device does not exist here.

    Example:
        >>> list(map(abs, [-2, 3], n_workers=2, engine="thread"))
        [2, 3]
    """
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
            if is_cancelled:  # while the workers were starting, in another thread
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
    given: list[Any] = []
    try:
        for given in lists:
            yield given
    finally:
        given.clear()
        cast("Generator[list[Any], None, None]", lists).close()
