"""What travels back in the place of a result when there is none."""

import contextlib
import pickle
import traceback
from typing import Any, Self

__all__ = ["DIED", "END", "INIT", "ITEM", "RAISED", "RESULT", "TIMEOUT", "Failure"]

RAISED = "raised"  # the work raised
ITEM = "item"  # the item cannot be pickled, or not be unpickled by the worker
RESULT = "result"  # the result cannot be pickled
DIED = "died"  # the worker died with it
TIMEOUT = "timeout"  # it took too long
INIT, END = "init", "end"  # a worker's start or end raised; no item is to blame


class Failure:
    """Why an item has no result. It can always be pickled: it holds text and bytes alone.

    Attributes:
        kind: One of this module's constants.
        summary: The exception's type and message, or a sentence.
        traceback: The worker's traceback, as Python prints it.
        exitcode: The exit status of a worker that died.
    """

    __slots__ = ("_exception", "_pickle", "exitcode", "held", "kind", "summary", "traceback")

    def __init__(self, kind: str, summary: str, *, exitcode: int | None = None) -> None:
        self.kind = kind
        self.summary = summary
        self.traceback = ""
        self.exitcode = exitcode
        self.held: tuple[int, ...] = ()
        self._exception: BaseException | None = None
        self._pickle = b""

    @classmethod
    def of(cls, error: BaseException, kind: str = RAISED, *, skip_frames: int = 1) -> Self:
        """Describe an exception that was just caught; our own frames at the top are left out."""
        trace = error.__traceback__
        for _ in range(skip_frames):
            trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
        failure = cls(kind, _summary(error))
        try:
            failure.traceback = "".join(traceback.format_exception(type(error), error, trace))
        except Exception:  # noqa: BLE001 - a user's __str__ may do anything
            failure.traceback = "".join(traceback.format_tb(trace)) + failure.summary
        failure._exception = error
        return failure

    @property
    def exception(self) -> BaseException | None:
        """The original exception, where it could be pickled and unpickled."""
        if self._exception is None and self._pickle:
            try:
                loaded = pickle.loads(self._pickle)
            except Exception:  # noqa: BLE001 - a user's __reduce__ may do anything
                loaded = None
            self._pickle = b""
            self._exception = loaded if isinstance(loaded, BaseException) else None
        return self._exception

    def __getstate__(self) -> tuple[Any, ...]:
        data = self._pickle
        if self._exception is not None:
            data = _pickled(self._exception)
        return self.kind, self.summary, self.traceback, self.exitcode, self.held, data

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.kind, self.summary, self.traceback, self.exitcode, self.held, self._pickle = state
        self._exception = None


def _summary(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 - a user's __str__ may do anything
        return f"{type(error).__name__}: <it cannot be printed>"


def _pickled(error: BaseException) -> bytes:
    with contextlib.suppress(Exception):  # a user's __reduce__ may do anything
        return pickle.dumps(error, 5)
    try:
        import cloudpickle  # type: ignore[import-untyped]  # it has no stubs

        data: bytes = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001 - as above; the text is kept
        return b""
    return data
