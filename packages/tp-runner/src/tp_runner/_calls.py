"""Streams over a pool's results: plain, with a progress bar, asynchronous."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from tp_core.errors import TpError

from tp_runner._source import length_of
from tp_runner._stream import ResultStream

if TYPE_CHECKING:
    from tp_runner._pool import RunnerPool

__all__ = ["astream", "map", "stream"]


def stream(pool: "RunnerPool", items: Iterable[Any], *, progress: bool) -> ResultStream:
    """Return an iterator over the results of a pool's call."""
    if not progress:
        return pool.run(items)
    from tp_runner._progress import shown

    lists, end = pool.lists(items)
    return ResultStream.over(shown(lists, length_of(items), pool), end)


async def astream(
    pool: "RunnerPool", items: Iterable[Any] | AsyncIterable[Any], *, progress: bool
) -> AsyncIterator[Any]:
    """Yield the results of a pool's call, whose loop runs in a thread."""
    loop = asyncio.get_running_loop()
    source = _pulled(items, loop) if isinstance(items, AsyncIterable) else items
    lists, _ = pool.lists(source)
    if progress:
        from tp_runner._progress import shown

        lists = shown(lists, length_of(items), pool)
    executor = ThreadPoolExecutor(1, thread_name_prefix="tp-runner-async")
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            step = loop.run_in_executor(executor, next, lists, None)
            results = await asyncio.shield(step)
            if results is None:
                return
            for result in results:
                yield result
    finally:
        if step is not None and not step.done():
            pool.cancel()
            with contextlib.suppress(TpError):
                await step
        await loop.run_in_executor(executor, lists.close)
        executor.shutdown(wait=False)


def _pulled(items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
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


def map(  # noqa: A001 - it is what the builtin is, on several workers
    function: Callable[..., Any],
    items: Iterable[Any],
    *,
    devices: Any = None,
    ordered: bool = True,
    init: Callable[[str], Any] | None = None,
    engine: str = "process",
    progress: bool = False,
    **options: Any,
) -> ResultStream:
    """Apply a function to each item on several workers; return a lazy iterator over the results.

    Args:
        function: Applied to each item; with ``init``, to the worker's state and the item; with
            ``batch``, to batches of items.
        items: Read lazily.
        devices: As for a runner: a number of CPU workers, devices, ``"auto"``; by default one CPU
            worker on each core.
        ordered: Whether results come in the order of the items or as they come.
        init: Makes the state of a worker, given its device as a string.
        engine: What the workers are.
        progress: Whether to show a progress bar.
        options: As for a runner: ``batch``, ``on_error``, ``retries``, ``timeout_s``, ...

    Returns:
        An iterator that starts the workers when it is first asked and ends them when it is
        exhausted, closed or dropped.

    Raises:
        ConfigError: An option is unknown or has a wrong value.

    Example:
        >>> list(map(abs, [-2, 3], devices=2, engine="thread"))
        [2, 3]
    """
    from tp_runner._devices import resolve
    from tp_runner._open import Opener
    from tp_runner._program import FunctionProgram

    program = FunctionProgram(function, init)
    opener = Opener(
        engine, program, resolve(devices, elsewhere=engine == "ray"), {**options, "ordered": ordered}
    )

    def lists() -> Generator[list[Any], None, None]:
        pool = opener.open()
        timeout_s = 0.0
        try:
            results, _ = pool.lists(items)
            if progress:
                from tp_runner._progress import shown

                results = shown(results, length_of(items), pool)
            yield from results
            timeout_s = 60.0
        finally:
            pool.close(timeout_s=timeout_s)

    steps = cast("Generator[list[Any], None, None]", _emptied(lists()))
    return ResultStream.over(steps, steps.close)


def _emptied(lists: Iterator[list[Any]]) -> Iterator[list[Any]]:
    """Yield the lists; when closed early, empty the one that was given last."""
    given: list[Any] = []
    try:
        for given in lists:
            yield given
    finally:
        given.clear()
        cast("Generator[list[Any], None, None]", lists).close()
