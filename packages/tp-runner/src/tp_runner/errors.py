"""The errors of runners.

::

    TpError
    ├── WorkerError        RuntimeError, and the     the work on an item, or a worker's start or end, raised
    │                      type of what was raised
    ├── WorkerDiedError    RuntimeError              a worker's process ended in the middle of its work
    ├── ItemTimeoutError   TimeoutError              an item took longer than it may
    ├── NotPicklableError  TypeError, PicklingError  an object that cannot travel between processes
    ├── RunnerClosedError  RuntimeError              a call on a runner that is closed
    └── RunCancelledError  CancelledError            a stream that was closed or cancelled while it was read
"""

import contextlib
import functools
import pickle
import types
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, ClassVar, cast

from tp_core.errors import TpError

__all__ = [
    "ItemError",
    "ItemTimeoutError",
    "NotPicklableError",
    "RunCancelledError",
    "RunnerClosedError",
    "WorkerDiedError",
    "WorkerError",
]


class ItemError(TpError):
    """An error that knows the item, the worker and the device that it is about.

    Attributes:
        index: The item's place in the input, from 0; ``None`` when no item is to blame.
        item: The item's ``repr``, shortened; empty when no item is to blame.
        device: The device of the worker.
        worker: The number of the worker, from 0.
        remote_traceback: The traceback in the worker with the chain of its causes, as Python prints it;
            may be empty.
        type_name: The full name of the original exception's type; empty when there was none.
    """

    original_type: ClassVar[type[Exception] | None] = None
    """The type of the original exception, where this class is a subclass of it, too."""

    def __init__(
        self,
        message: str,
        *,
        index: int | None = None,
        item: str = "",
        device: str = "",
        worker: int = -1,
        remote_traceback: str = "",
        type_name: str = "",
    ) -> None:
        super().__init__(message)
        self.index = index
        self.item = item
        self.device = device
        self.worker = worker
        self.remote_traceback = remote_traceback
        self.type_name = type_name

    def __str__(self) -> str:
        # Not the `__str__` of KeyError or OSError, which an error may be, too: they print other text.
        if self.args:
            return str(self.args[0])
        return ""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.original_type is None:
            kind = type(self)
        else:
            kind = type(self).__mro__[1]
        exceptions = getattr(self, "exceptions", ())  # of a group
        return rebuild_error, (kind, self.original_type, self.args, self.__dict__, exceptions)


class WorkerError(ItemError, RuntimeError):
    """The work on an item raised, or a worker's start or end did.

    What was raised, where it can be pickled, is the ``__cause__``. The error is of its type too, with its
    attributes: ``except ValueError`` catches a ``WorkerError`` about a ``ValueError``. One about an
    ``ExceptionGroup`` is a group, from which ``except*`` takes what it names.
    """


class WorkerDiedError(ItemError, RuntimeError):
    """A worker's process ended in the middle of its work.

    Attributes:
        exitcode: Its exit status; the negative number of the signal that killed it.
        held: The places in the input of all items that it held.
    """

    exitcode: int | None = None
    held: tuple[int, ...] = ()


class ItemTimeoutError(ItemError, TimeoutError):
    """An item took longer than ``timeout_s`` seconds; its worker was replaced."""


class NotPicklableError(ItemError, TypeError, pickle.PicklingError):
    """An item, a result or a runner's class that cannot travel to or from a worker."""


class RunnerClosedError(TpError, RuntimeError):
    """A call on a runner or an executor that is closed; or a submitted item that never finished."""


class RunCancelledError(TpError, CancelledError):
    """A stream that was closed or cancelled while a thread or task waited for its results."""


_Group = Sequence[BaseException]


def make_error(
    kind: type[ItemError],
    original_type: type[BaseException] | None,
    message: str,
    *,
    exceptions: _Group = (),
    **details: Any,
) -> ItemError:
    """Make an error of a kind, and of the type of the original exception, too, where Python allows it.

    Args:
        kind: The kind.
        original_type: The type of the original exception.
        message: What the error says.
        exceptions: Those of the original exception, if it is a group.
        details: The attributes of the error.
    """
    if (
        original_type is not None
        and issubclass(original_type, Exception)
        and not issubclass(kind, original_type)
        # In a generator these would mean its end.
        and not issubclass(original_type, StopIteration | StopAsyncIteration)
    ):
        if issubclass(original_type, ExceptionGroup):
            details["exceptions"] = exceptions
        with contextlib.suppress(Exception):  # a layout, a metaclass or a user's code may be against it
            error: ItemError = _combined_class(kind, original_type)(message, **details)
            return error
        details.pop("exceptions", None)
    return kind(message, **details)


def _make_combined_class(kind: Any, original_type: Any) -> Any:
    builtin: Any = next(base for base in original_type.__mro__ if base.__module__ == "builtins")

    def new(cls: type[ItemError], *args: Any, exceptions: _Group = (), **_: Any) -> ItemError:
        error: ItemError
        if exceptions:
            return cast("ItemError", builtin.__new__(cls, args[0], exceptions))
        try:
            error = builtin.__new__(cls)
        except TypeError:  # MemoryError's makes no other classes, and adds nothing to those of RuntimeError
            error = kind.__new__(cls)
        error.args = args
        return error

    def init(self: ItemError, *args: Any, exceptions: _Group = (), **details: Any) -> None:
        del exceptions  # which __new__ has taken
        kind.__init__(self, *args, **details)

    members = {
        "__new__": new,
        "__init__": init,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "original_type": original_type,
    }
    return type(kind.__name__, (kind, original_type), members)


_combined_class: Callable[..., Any] = functools.lru_cache(maxsize=256)(_make_combined_class)


def copy_attributes(original: BaseException, error: ItemError) -> None:
    """Copy attributes of the original exception, such as ``errno``, to an error; its own stay."""
    for base in type(original).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType):
                if name.startswith("__") or name == "args":
                    continue
                with contextlib.suppress(Exception):
                    setattr(error, name, getattr(original, name))
    error.__dict__.update({name: value for name, value in vars(original).items() if name not in vars(error)})


def rebuild_error(
    kind: type[ItemError],
    original_type: type[Exception] | None,
    args: tuple[Any, ...],
    state: dict[str, Any],
    exceptions: _Group = (),
) -> ItemError:
    """Make an error again from its parts, also with another original type."""
    error = make_error(kind, original_type, *args, exceptions=exceptions)
    error.__dict__.update(state)
    return error
