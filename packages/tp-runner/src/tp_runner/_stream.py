"""The iterator of results that callers get and may share between threads."""

import contextlib
import copy
import itertools
import operator
import os
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeVar

from tp_core.errors import ConfigError, TpError

from tp_runner._workers._fleet import is_program_ending
from tp_runner.errors import RunCancelledError, RunnerClosedError

R_co = TypeVar("R_co", covariant=True)

FORKED = (
    "this runner belongs to process {owner}, of which this one is a copy, and its workers answer to that one "
    "alone; make a runner here"
)


class OpenRun(NamedTuple):
    """The consumer's side of a run."""

    chunks: Generator[list[Any], None, None]  # neighboring results, list by list
    end: Callable[[], None]  # ends them, from any thread
    # does the same, and waiting threads get ``RunCancelledError``. It takes the seconds after which workers
    # that are still busy with them are killed, or ``None``
    cancel: Callable[[float | None], None]
    stats: Callable[[], Any]  # returns the workers' statistics so far


class Interruption(list[Any]):
    """The error of a signal handler, in place of a list of results.

    It passes through generators as a list, as an exception would end them. Taking results from it raises
    the error.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> NoReturn:
        raise self.error


class ResultStream(Iterator[R_co], Generic[R_co]):
    """Results one by one; closing it early stops the work and leaves the runner usable.

    Threads may share it: each result comes once, in the order in which they ask, and an error that ends it is
    raised in each of them.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._owner = os.getpid()
        # A list's iterator gives each item once to any number of threads. All of them take from this one.
        self._piece: Iterator[Any] = iter(())
        self._fetched: list[Any] | None = None
        # Held in the wait for the next list. Reentrant: a signal handler of that thread may close the stream.
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        # The threads that have raised the error. Not a set of identifiers: a thread that begins after the end
        # of another one may get the same, and would miss the error.
        self._here = threading.local()

    def __iter__(self) -> Iterator[R_co]:  # noqa: PYI034 - each loop gets its own
        # A chain for each loop: in C, so that small results cost next to nothing here.
        return itertools.chain.from_iterable(_Pieces(self._next_piece))

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse an index: results come once, in their order."""
        msg = f"a stream has results one by one, and none at [{key!r}]; write list(stream)[{key!r}]"
        raise ConfigError(msg)

    def __aiter__(self) -> NoReturn:
        """Refuse ``async for``: each of its steps would hold up the event loop."""
        msg = (
            "this stream is for a plain loop: for result in stream; for async for take runner.astream(items)"
        )
        raise ConfigError(msg)

    def __next__(self) -> R_co:
        while True:
            for result in self._piece:
                return result  # type: ignore[no-any-return]  # lists of any results
            self._next_piece()

    def _next_piece(self) -> Iterator[Any]:
        """Return the results that are next, when those before them are taken."""
        if self._owner != os.getpid():  # before the lock, which a thread of the other process may hold
            raise RunnerClosedError(FORKED.format(owner=self._owner))
        with self._lock:
            if operator.length_hint(self._piece):  # another thread has fetched them
                return self._piece
            if self._fetched is None:
                self._fetch()
            if isinstance(self._fetched, Interruption):
                interruption, self._fetched = self._fetched, None
                raise interruption.error
            # In one statement: between two, a signal handler may raise, and results would be doubled.
            self._piece, self._fetched = iter(self._fetched or ()), None
            return self._piece

    def _fetch(self) -> None:
        chunks = self._run.chunks
        try:
            # A loop stores its value before a signal handler can run; the assignment of a call does not, and
            # a handler that raises would lose the list.
            for self._fetched in chunks:
                return
        except BaseException as error:
            if _is_of_the_end(error):
                threading.Event().wait()  # until Python stops this thread, a moment later and without a word
            # A generator that has ended has no frame; or a handler has raised here. Not by inspect: each
            # first start would wait for its import, and at the end of Python nothing is imported any more.
            if getattr(chunks, "gi_frame", None) is None:
                self._error, self._here.is_raised = error, True
            raise
        ended_by = self._error
        if ended_by is not None and not hasattr(self._here, "is_raised"):
            self._here.is_raised = True
            # Each thread gets a copy where it can: raising an exception writes on it.
            if isinstance(ended_by, TpError):
                raise copy.copy(ended_by)
            raise ended_by
        if ended_by is not None and not isinstance(ended_by, TpError):
            # Where the error of a signal handler was caught, StopIteration would look like a regular end.
            msg = f"this stream has ended with {ended_by!r}"
            raise RunCancelledError(msg)
        raise StopIteration

    def close(self) -> None:
        """Stop the stream; the runner stays usable."""
        self._run.end()
        # Without a wait: a thread that waits for a result holds the lock, and does the rest itself.
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(ValueError):  # called from within, by a signal handler
                    self._run.chunks.close()
            finally:
                self._lock.release()

    def cancel(self, *, kill_after_s: float | None = None) -> None:
        """Stop, from any thread: a thread that waits for a result gets ``RunCancelledError``.

        Args:
            kill_after_s: Wait this many seconds for workers that are busy with this stream's items, then kill
                and replace them; the others keep their states. By default such a worker finishes its item.

        Raises:
            ConfigError: ``kill_after_s`` is given, and these workers cannot be killed.
        """
        self._run.cancel(kill_after_s)

    def stats(self) -> Any:
        """Return the workers' statistics so far, as ``stats()`` of the runner or the pipeline does.

        Raises:
            RunnerClosedError: This is a stream of ``map``, and no result was asked for yet.
        """
        return self._run.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_of_the_end(error: BaseException) -> bool:
    """Return whether a daemon thread was at work when the program ended, and its workers with it.

    Raised there, the error would be printed as one of the program's.
    """
    is_closed = isinstance(error, RunnerClosedError)
    return is_closed and is_program_ending() and threading.current_thread().daemon


class _Pieces:
    """The lists of a stream for a loop's chain, without exceptions: after one, a chain forgets the rest."""

    def __init__(self, next_piece: Callable[[], Iterator[Any]]) -> None:
        self._next_piece = next_piece

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterator[Any]:
        try:
            return self._next_piece()
        except StopIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - raised as the chain's next result
            return _raising(error)


def _raising(error: BaseException) -> Iterator[Any]:
    raise error
    yield
