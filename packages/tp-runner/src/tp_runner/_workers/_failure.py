"""The failure that travels back in place of a result."""

import contextlib
import functools
import itertools
import pickle
import signal
import threading
import traceback
import types
from typing import Any, NamedTuple, Self

from tp_core.ranks import dumps_by_value

RAISED = "raised"  # the work raised
ITEM = "item"  # the item cannot be pickled, or not be unpickled by the worker
RESULT = "result"  # the result cannot be pickled
DIED = "died"  # the worker died with it
TIMEOUT = "timeout"  # it took too long
_DEEPEST = 20  # exceptions of one chain
INIT, END = "init", "end"  # a worker's start or end raised; no item is to blame
ENDING = "ending"  # the value of its end cannot be pickled


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether an exception came out of a signal handler, which may interrupt any line of this package.

    It must not pass for one of the user's code that this line has called.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread runs handlers
        return False
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> types.CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    code: types.CodeType | None = getattr(handler, "__code__", None)  # of functions and methods
    if code is None:
        code = getattr(type(handler).__call__, "__code__", None)
    return code


class Failure:
    """The reason why an item has no result. It can always be pickled: it holds only text and bytes."""

    __slots__ = (
        "_exception",
        "_pickle",
        "_type_pickle",
        "exitcode",
        "held",
        "kind",
        "summary",
        "traceback",
        "type_name",
        "worker",
    )

    def __init__(self, kind: str, summary: str, *, exitcode: int | None = None) -> None:
        self.kind = kind  # one of this module's constants
        self.summary = summary  # the exception's type and message, or a sentence
        self.traceback = ""  # the worker's traceback, as Python prints it
        self.exitcode = exitcode  # the exit status of a worker that died
        self.held: tuple[int, ...] = ()  # the places in the input of all items that it held
        self.worker = 0  # the number of the worker where it happened, once the parent knows of it
        self._exception: BaseException | None = None
        self._pickle = b""
        self._type_pickle = b""
        self.type_name = ""  # the full name of the exception's type; empty if there was none

    @classmethod
    def of(cls, error: BaseException, kind: str = RAISED, *, skip_frames: int = 1) -> Self:
        """Describe an exception that was just caught, without this package's frames at the top."""
        trace = error.__traceback__
        for _ in range(skip_frames):
            if trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
        failure = cls(kind, _summary(error))
        try:
            failure.traceback = "".join(traceback.format_exception(type(error), error, trace))
        except Exception:  # noqa: BLE001 - a user's __str__ may do anything
            failure.traceback = "".join(traceback.format_tb(trace)) + failure.summary
        failure._exception = error.with_traceback(trace)
        kind_of = _original_type(error)
        failure.type_name = f"{kind_of.__module__}.{kind_of.__qualname__}".removeprefix("builtins.")
        return failure

    @property
    def original_type(self) -> type[BaseException] | None:
        """The type of the original exception, where it is known, even if the exception was lost."""
        if self.exception is not None:
            return _original_type(self.exception)
        if not self._type_pickle:
            return None
        with contextlib.suppress(Exception):  # it may be unknown here
            loaded = pickle.loads(self._type_pickle)
            if isinstance(loaded, type) and issubclass(loaded, BaseException):
                return loaded
        return None

    @property
    def exception(self) -> BaseException | None:
        """The original exception, where it could be pickled and unpickled."""
        if self._exception is None and self._pickle:
            try:
                chain = pickle.loads(self._pickle)
                self._exception = _relink_chain(chain)
            except Exception:  # noqa: BLE001 - a user's __reduce__ may do anything
                self._exception = None
            self._pickle = b""
        return self._exception

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__slots__}
        if self._exception is not None:
            state["_pickle"] = _try_pickle(_exception_chain(self._exception))
            state["_type_pickle"] = _try_pickle(_original_type(self._exception))
        return state | {"_exception": None, "worker": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _summary(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # noqa: BLE001 - a user's __str__ may do anything
        return f"{type(error).__name__}: <it cannot be printed>"


def _original_type(error: BaseException) -> type[BaseException]:
    """Return the type of an exception; for an error of ours, the type of the exception it is about."""
    return getattr(error, "original_type", None) or type(error)


class _Link(NamedTuple):
    """One exception of a chain, pickled without the others."""

    data: bytes
    is_cause: bool  # whether it was raised from the next
    trace: dict[str, Any] | None


def _exception_chain(error: BaseException) -> list[_Link]:
    """Return an exception and its causes and contexts.

    Pickle drops ``__cause__``, ``__context__`` and tracebacks, so each one is pickled apart.
    """
    chain: list[_Link] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(chain) < _DEEPEST:
        seen.add(id(current))
        is_cause = current.__cause__ is not None
        chain.append(_Link(_try_pickle(current), is_cause, _dump_traceback(current.__traceback__)))
        # The one that Python prints above it.
        is_explicit = is_cause or current.__suppress_context__
        if is_explicit:
            current = current.__cause__
        else:
            current = current.__context__
    return chain


def _relink_chain(chain: list[_Link]) -> BaseException | None:
    """Undo :func:`_exception_chain`, down to the first exception that cannot be rebuilt."""
    errors: list[tuple[BaseException, bool]] = []
    for data, is_cause, trace in chain:
        loaded = None
        if data:
            with contextlib.suppress(Exception):  # a user's __reduce__ may do anything
                loaded = pickle.loads(data)
        if not isinstance(loaded, BaseException):
            break
        errors.append((loaded.with_traceback(_load_traceback(trace)), is_cause))
    if not errors:
        return None
    for (error, is_cause), (below, _) in itertools.pairwise(errors):
        if is_cause:
            error.__cause__ = below
        else:
            error.__context__ = below
    outermost, _ = errors[0]
    return outermost


def _dump_traceback(trace: types.TracebackType | None) -> dict[str, Any] | None:
    """Return a traceback as plain values; ``None`` where tblib is not installed: the text is always kept."""
    if trace is None:
        return None
    with contextlib.suppress(Exception):  # a frame may have anything in its names
        import tblib

        dumped: dict[str, Any] = tblib.Traceback(trace).to_dict()
        return dumped
    return None


def _load_traceback(trace: dict[str, Any] | None) -> types.TracebackType | None:
    if not trace:
        return None
    with contextlib.suppress(Exception):  # as above
        import tblib

        loaded: types.TracebackType | None = tblib.Traceback.from_dict(trace).as_traceback()
        return loaded
    return None


def _try_pickle(error: Any) -> bytes:
    with contextlib.suppress(Exception):  # a user's __reduce__ may do anything
        return pickle.dumps(error, 5)
    with contextlib.suppress(Exception):
        return dumps_by_value(error)
    return b""  # the text of the error is there in any case
