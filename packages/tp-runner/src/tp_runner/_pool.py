"""Workers that are running, and the calls made on them, one after the other."""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

from tp_core.errors import ConfigError

from tp_runner._at_exit import watch
from tp_runner._call import Call
from tp_runner._errors import RunnerBusy, RunnerClosed
from tp_runner._fleet import Died, Done, Event, Fleet
from tp_runner._roster import Roster
from tp_runner._server import Server, settle
from tp_runner._settings import Settings
from tp_runner._source import open_source
from tp_runner._stats import RunnerStats
from tp_runner._stream import ResultStream

__all__ = ["RunnerPool"]

_SUPERSEDED = (
    "this stream was ended because its runner was called again in the same thread; finish or close "
    "a stream before the next call, or use a second runner"
)
_SERVING = "this runner is working on submitted items; wait for their futures, or use a second runner"
_BUSY = "this runner is working on another call, of another thread; wait for that one, or use a second runner"


class RunnerPool(Roster):
    """A fleet of workers. One call at a time; a second thread is refused with a sentence.

    Attributes:
        paused: Whether no more items are handed out.
    """

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        super().__init__(fleet, settings)
        self.paused = False
        self._n_calls = 0
        self._call: Call | None = None
        self._lock = threading.RLock()
        self._stepping = threading.RLock()  # held by whoever uses the fleet
        self._server: Server | None = None
        self._closed = False
        self._owner = os.getpid()
        self.fleet.start()
        watch(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(timeout_s=60.0 if kind is None else 0.0)

    # -- calls ---------------------------------------------------------------------------------

    def run(self, items: Iterable[Any], *, ordered: bool | None = None) -> ResultStream:
        """Return an iterator over the result of each item, in the items' order or as they come.

        Items are read lazily, and only so far ahead as the workers need. Closing the iterator early
        leaves the pool usable.

        Raises:
            RunnerClosed: The pool is closed.
        """
        return ResultStream.over(*self.lists(items, ordered=ordered))

    def lists(
        self, items: Iterable[Any], *, ordered: bool | None = None
    ) -> tuple[Generator[list[Any], None, None], Callable[[], None]]:
        """Return what :meth:`run` does as lists of neighbouring results, and what ends them."""
        self._require_open()
        self.stop_serving()
        ordered = self.settings.ordered if ordered is None else ordered
        calls: list[Call] = []
        steps = self._steps(items, calls, ordered=ordered)

        def end() -> None:
            for call in calls:
                call.ended_by = call.ended_by or "this stream was closed"
            try:
                steps.close()
            except ValueError:  # it is being read by another thread, which must notice
                self.fleet.wake()

        return steps, end

    def run_numbered(self, items: Iterable[Any]) -> Iterator[list[tuple[int, Any]]]:
        """Yield lists of pairs of an item's place and its result or error, as they come."""
        return self._steps(items, [], ordered=False, numbered=True)

    def _steps(
        self, items: Iterable[Any], calls: list[Call], *, ordered: bool, numbered: bool = False
    ) -> Generator[list[Any], None, None]:
        call = self._open_call(items, ordered=ordered, numbered=numbered)
        calls.append(call)
        results = call.results()
        try:
            while True:
                with self._stepping:
                    given = next(results, None)
                if given is None:
                    return
                yield given
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            # An interrupt may have come between reading a message and acting on it.
            self._reset()
            raise
        finally:
            call.end()
            with self._lock:
                if self._call is call:
                    self._call = None

    def _open_call(self, items: Iterable[Any], *, ordered: bool, numbered: bool) -> Call:
        with self._lock:
            self._require_open()
            if self._server is not None and not numbered:
                raise RunnerBusy(_SERVING)
            if self._call is not None:
                if self._call.owner != threading.get_ident():
                    raise RunnerBusy(_BUSY)
                self._call.end(_SUPERSEDED)
            self._note(self.fleet.poll(0))
            self._note(self.fleet.start())
            self._n_calls += 1
            settings = self.settings
            source = open_source(
                items, self.fleet.wake, direct=self.fleet.direct, max_wait_s=settings.max_wait_s
            )
            self._call = Call(
                self,
                source,
                ordered=ordered,
                number=self._n_calls,
                numbered=numbered,
                on_error="return" if numbered else settings.on_error,
            )
            return self._call

    # -- from other threads --------------------------------------------------------------------

    def submit(self, item: Any) -> "Future[Any]":
        """Return a future of the result of one item.

        Raises:
            RunnerBusy: The pool is working on a call.
            RunnerClosed: The pool is closed.
        """
        with self._lock:
            self._require_open()
            if self.fleet.direct:
                return self._done_at_once(item)
            if self._server is None or self._server.ended:
                if self._call is not None:
                    raise RunnerBusy(_BUSY)
                self._server = Server(self)
            return self._server.submit(item)

    def _done_at_once(self, item: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        for pairs in self.run_numbered([item]):
            for _, result in pairs:
                settle(future, result)
        return future

    def stop_serving(self) -> None:
        """Leave the state that :meth:`submit` brings, when nothing is being worked on."""
        with self._lock:
            server = self._server
        if server is not None and server.is_idle():
            server.stop()
            self._server = None

    def pause(self) -> None:
        """Hand out no more items until :meth:`resume`; results of those on their way still come."""
        self.paused = True

    def resume(self) -> None:
        """Go on handing out items."""
        self.paused = False
        self.fleet.wake()

    def cancel(self) -> None:
        """End the current call: whoever waits for its results gets ``RunCancelled``."""
        with self._lock:
            if self._call is not None:
                self._call.ended_by = "cancelled"
                self.fleet.wake()

    def stats(self) -> RunnerStats:
        """Return what the workers did so far."""
        return self.tally.snapshot()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what each worker did when, in the Chrome trace format.

        Raises:
            ConfigError: The pool was opened without ``timeline=True``.
        """
        if not self.settings.timeline:
            msg = "nothing was kept for a timeline; open the runner with timeline=True"
            raise ConfigError(msg)
        self.tally.write_timeline(path)

    def close(self, *, timeout_s: float = 60.0) -> None:
        """End the workers; calling it again does nothing.

        Args:
            timeout_s: How long they may take over their end; 0 kills them at once.
        """
        with self._lock:
            if self._closed or self._owner != os.getpid():
                return
            self._closed = True
            server, call = self._server, self._call
        if server is not None:
            server.stop(wait=timeout_s > 0)
        if call is not None:
            call.ended_by = "this runner was closed"
            self.fleet.wake()
        with self._stepping:
            if call is not None:
                call.end()
            self.fleet.close(timeout_s=timeout_s)

    def stop(self) -> None:
        """End the workers at once."""
        self.close(timeout_s=0.0)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            msg = "this runner is closed; activate() starts it again"
            raise RunnerClosed(msg)

    def _reset(self) -> None:
        self.fleet.reset()
        self.forget_all()

    def _note(self, events: Iterable[Event]) -> None:
        """Take note of what happened between two calls."""
        for event in events:
            if isinstance(event, Done):
                self.arrived(event)
            elif isinstance(event, Died):
                self.lost(event.worker)
