"""What a runner raises on purpose.

::

    TpError
    ├── WorkerError        RuntimeError              the work on an item, or a worker's start or end, raised
    ├── WorkerDied         RuntimeError              a worker's process ended in the middle of its work
    ├── ItemTimeout        TimeoutError              an item took longer than it may
    ├── NotPicklableError  TypeError, PicklingError  an object that cannot travel between processes
    ├── RunnerBusy         RuntimeError              a second call while the first one is running
    ├── RunnerClosed       RuntimeError              a call on a runner that is closed
    └── RunCancelled       CancelledError            a call that was ended by ``cancel()``
"""

import pickle
from concurrent.futures import CancelledError
from typing import Any

from tp_core.errors import TpError

__all__ = [
    "ItemTimeout",
    "NotPicklableError",
    "RunCancelled",
    "RunnerBusy",
    "RunnerClosed",
    "WorkerDied",
    "WorkerError",
]


class ItemError(TpError):
    """An error that knows the item, the worker and the device that it is about.

    Attributes:
        index: The item's place in the input, from 0; ``None`` when no item is to blame.
        item: The item's ``repr``, shortened; empty when no item is to blame.
        device: The device of the worker.
        worker: The number of the worker, from 0.
        remote_traceback: The traceback in the worker, as Python prints it; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        index: int | None = None,
        item: str = "",
        device: str = "",
        worker: int = -1,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.index = index
        self.item = item
        self.device = device
        self.worker = worker
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class WorkerError(ItemError, RuntimeError):
    """The work on an item raised, or a worker's start or end did.

    The original exception, where it can be pickled, is the ``__cause__``.
    """


class WorkerDied(ItemError, RuntimeError):  # noqa: N818 - says what happened
    """A worker's process ended in the middle of its work.

    Attributes:
        exitcode: Its exit status; the negative number of the signal that killed it.
        held: The places in the input of all items that it held.
    """

    exitcode: int | None = None
    held: tuple[int, ...] = ()


class ItemTimeout(ItemError, TimeoutError):  # noqa: N818 - says what happened
    """An item took longer than ``timeout_s``; its worker was replaced."""


class NotPicklableError(ItemError, TypeError, pickle.PicklingError):
    """An item, a result or a runner's class that cannot travel to or from a worker."""


class RunnerBusy(TpError, RuntimeError):  # noqa: N818 - says what is the matter
    """A second call on a runner while the first one is running."""


class RunnerClosed(TpError, RuntimeError):  # noqa: N818 - says what is the matter
    """A call on a runner that is closed."""


class RunCancelled(TpError, CancelledError):  # noqa: N818 - says what happened
    """A call that was ended by ``cancel()``."""


def _rebuild(kind: type[TpError], args: tuple[Any, ...], state: dict[str, Any]) -> TpError:
    error = kind(*args)
    error.__dict__.update(state)
    return error
