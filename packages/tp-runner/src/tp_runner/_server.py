"""Items that come one by one, from any thread, each with a future of its result."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tp_core.errors import TpError

from tp_runner._errors import RunnerClosed

if TYPE_CHECKING:
    from tp_runner._pool import RunnerPool

__all__ = ["Server", "settle"]


def settle(future: "Future[Any]", result: Any) -> None:
    """Give a future its result, or the error that stands in its place."""
    if isinstance(result, TpError) and hasattr(result, "remote_traceback"):
        future.set_exception(result)
    else:
        future.set_result(result)


class Server:
    """Runs a call without an end in a thread, over the items that are submitted."""

    def __init__(self, pool: "RunnerPool") -> None:
        self.ended = False
        self._pool = pool
        self._items: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Any]] = {}
        self._n_open = 0
        self._n_read = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="tp-runner-server", daemon=True)
        self._thread.start()

    def submit(self, item: Any) -> "Future[Any]":
        """Put an item in line."""
        future: Future[Any] = Future()
        with self._lock:
            self._n_open += 1
        future.add_done_callback(self._closed_one)
        self._items.put((item, future))
        return future

    def _closed_one(self, _: "Future[Any]") -> None:
        with self._lock:
            self._n_open -= 1

    def is_idle(self) -> bool:
        """Whether every future that was given out is done."""
        return not self._n_open

    def stop(self, *, wait: bool = True) -> None:
        """Take no more items, and end when those in line are done."""
        self._items.put(None)
        if not wait:
            self._abandon(RunnerClosed("the runner was closed before this item was done"))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self) -> Iterator[Any]:
        while (entry := self._items.get()) is not None:
            item, future = entry
            if future.set_running_or_notify_cancel():
                self._waiting[self._n_read] = future
                self._n_read += 1
                yield item

    def _serve(self) -> None:
        try:
            for pairs in self._pool.run_numbered(self._read()):
                for index, result in pairs:
                    settle(self._waiting.pop(index), result)
        except BaseException as error:  # noqa: BLE001 - it belongs to those who wait
            self._abandon(error)
        finally:
            self.ended = True

    def _abandon(self, error: BaseException) -> None:
        self.ended = True
        while True:
            try:
                entry = self._items.get_nowait()
            except queue.Empty:
                break
            if entry is not None and entry[1].set_running_or_notify_cancel():
                entry[1].set_exception(error)
        while self._waiting:
            _, future = self._waiting.popitem()
            if not future.done():
                future.set_exception(error)
