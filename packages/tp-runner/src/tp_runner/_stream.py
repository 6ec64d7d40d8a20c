"""The iterator of results that callers get."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

__all__ = ["ResultStream"]


class ResultStream(itertools.chain[Any]):
    """Results one by one; closing it early stops the work and leaves the runner usable.

    It is a chain of lists, so that a small result costs next to nothing on its last step.
    """

    _end: Callable[[], None]
    _cancel: Callable[[], None]
    _stats: Callable[[], Any]

    @classmethod
    def over(
        cls,
        chunks: Iterator[list[Any]],
        end: Callable[[], None],
        cancel: Callable[[], None],
        stats: Callable[[], Any],
    ) -> Self:
        """Return a stream over lists of results, with what ends it, cancels it and tells of its workers."""
        stream = cast("Self", cls.from_iterable(chunks))  # of this class, whatever the stubs say
        stream._end = end
        stream._cancel = cancel
        stream._stats = stats
        return stream

    def close(self) -> None:
        """Stop; nothing more comes, and the runner can be used further."""
        self._end()

    def cancel(self) -> None:
        """Stop, from any thread: whoever waits for a result gets ``RunCancelledError``."""
        self._cancel()

    def stats(self) -> Any:
        """Return what the workers have done so far, as ``stats()`` of the runner or the pipeline does.

        Raises:
            RunnerClosedError: This is a stream of ``map``, and no result was asked for yet.
        """
        return self._stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
