"""An engine for tp-runner: threads of concurrent.futures.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core.errors import ConfigError, TpError
from tp_core.plugins import Engine, Pool, Verdict, hookimpl

if TYPE_CHECKING:
    import torch

tp_contract = 1


class MyPluginEngine(Engine):
    """Starts one thread for each device."""

    name: ClassVar[str] = "my-plugin"

    def assess(self, devices: "Sequence[torch.device]") -> Verdict:
        """Fit any devices, below the engines that come with tp-runner."""
        return Verdict.fits(5, f"{len(devices)} threads of concurrent.futures")

    def open(
        self,
        worker: Callable[..., Any],
        devices: "Sequence[torch.device]",
        *,
        options: Mapping[str, Any],
    ) -> Pool:
        """Make the workers, each with its device.

        Raises:
            ConfigError: There are options; this engine has none.
        """
        if options:
            names = ", ".join(map(repr, options))
            raise ConfigError(f"the engine {self.name!r} has no options, got {names}")
        return MyPluginPool(worker, devices)


class MyPluginPool(Pool):
    """Workers that wait in a queue for the next item, so that each keeps its own state."""

    def __init__(self, worker: Callable[..., Any], devices: "Sequence[torch.device]") -> None:
        self._workers: queue.SimpleQueue[Callable[[Any], Any]] = queue.SimpleQueue()
        for device in devices:
            self._workers.put(worker(device))
        self._ahead = 2 * len(devices)
        self._executor = ThreadPoolExecutor(len(devices))
        self._is_closed = False

    def run(self, items: Iterable[Any], *, ordered: bool = True) -> Iterator[Any]:
        """Yield the result of each item; a few items are read ahead.

        Raises:
            TpError: The pool is closed, or an item failed; the message names it.
        """
        if self._is_closed:
            raise TpError("the pool is closed; open another one")
        waiting: deque[Future[Any]] = deque()
        try:
            for item in items:
                waiting.append(self._executor.submit(self._apply, item))
                if len(waiting) > self._ahead:
                    yield _take(waiting, ordered)
            while waiting:
                yield _take(waiting, ordered)
        finally:
            for future in waiting:
                future.cancel()

    def _apply(self, item: Any) -> Any:
        work = self._workers.get()
        try:
            return work(item)
        except Exception as error:
            raise TpError(f"item {item!r} failed: {error}") from error
        finally:
            self._workers.put(work)

    def close(self) -> None:
        """End the threads; calling it again does nothing."""
        self._is_closed = True
        self._executor.shutdown(cancel_futures=True)


def _take(waiting: deque[Future[Any]], ordered: bool) -> Any:
    if ordered:
        return waiting.popleft().result()
    done = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
    waiting.remove(done)
    return done.result()


@hookimpl
def tp_engines() -> Iterable[Engine]:
    """Bring the engine."""
    return [MyPluginEngine()]
