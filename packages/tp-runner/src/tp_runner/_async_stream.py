"""Asynchronous streams over the results of a pool; in a module apart, as the others need no asyncio."""

import asyncio
import contextlib
import copy
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from tp_core.errors import ConfigError, TpError

from tp_runner._scheduling._source import length_of
from tp_runner._stream import ResultStream
from tp_runner.errors import RunCancelledError

if TYPE_CHECKING:
    from tp_runner._scheduling._pool import RunnerPool

_END_S = 5.0  # limit for a cancelled step at the end of an event loop


class _OpenStream(NamedTuple):
    executor: ThreadPoolExecutor
    chunks: Generator[list[Any], None, None]
    cancel: Callable[[float | None], None]


class AsyncResultStream(AsyncIterator[Any]):
    """The results of one run of a pool, for ``async for``.

    The run begins with the first request for a result. It ends as soon as the stream is exhausted, closed or
    dropped, or the waiting task is cancelled. It is no asynchronous generator: one that is left early ends
    when the event loop chooses, or never.
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
        # One task at a time is in the generator of results.
        self._fetching = asyncio.Lock()
        self._error: BaseException | None = None
        self._raised_in: weakref.WeakSet[Any] = weakref.WeakSet()  # the tasks that have got that error

    def __aiter__(self) -> Self:
        return self

    def __iter__(self) -> NoReturn:
        """Refuse a plain loop, which cannot wait for results."""
        msg = (
            "an asynchronous stream has its results in a coroutine: async for result in stream; for a plain "
            "loop take runner.stream(items)"
        )
        raise ConfigError(msg)

    async def __anext__(self) -> Any:
        while not self._ready:
            # Tasks may share the stream: one of them fetches, and all of them take.
            async with self._fetching:
                if self._ready:
                    break
                if self._has_ended:
                    task = asyncio.current_task()
                    if self._error is None or task in self._raised_in:
                        raise StopAsyncIteration
                    self._raised_in.add(task)
                    if isinstance(self._error, TpError):
                        raise copy.copy(self._error)
                    raise self._error
                results = await self._next_results()
                if results is None:
                    self._end()
                else:
                    self._ready.extend(results)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End the run; drop results that were not taken yet."""
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
        """End with an error, so that no other task takes the failure for the end of the results."""
        self._error = error
        self._raised_in.add(asyncio.current_task())
        self._end()

    def _begin(self) -> _OpenStream:
        items, loop = self._items, asyncio.get_running_loop()
        source: Any = items
        # A plain stream has an `__aiter__`, too: one that refuses.
        if isinstance(items, AsyncIterable) and not isinstance(items, ResultStream):
            source = _iterate_async(items, loop)
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
        except ValueError:  # the thread still runs in it, after the end of the event loop
            begun.cancel(None)
            begun.executor.submit(begun.chunks.close)
        begun.executor.shutdown(wait=False)


def _forget_error(result: "asyncio.Future[Any]") -> None:
    """Retrieve the error of a cancelled call, or asyncio would log it as never retrieved."""
    if not result.cancelled():
        result.exception()


async def _await_step(step: "Future[Any]", result: "asyncio.Future[Any]") -> None:
    """Wait until a cancelled call has ended, also through further cancellations."""
    with contextlib.suppress(TpError):
        try:
            await asyncio.shield(result)
        except asyncio.CancelledError:  # the event loop is about to end; the next user needs the pool
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
