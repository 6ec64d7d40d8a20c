"""Workers of a DataLoader that outlive the signals which end a run, and end when the run does.

Schedulers, terminals and launchers signal all processes of a run at once. What that means is for the
process that trains to know: it takes its step to the end and saves, and needs its workers for that.
torch's workers die of SIGTERM, SIGINT, SIGHUP and SIGUSR1 instead, and take the run along. Here
each one ignores them from its first moment on::

    start()       the signals are blocked while a worker is started: it begins with them blocked
    initializer   in the worker, after torch has set its own handlers: ours are set, the user's
                  ``worker_init_fn`` is called, which may set others, and the signals are let through
    terminate()   in the parent, for a worker that does not end: SIGKILL, as it ignores the others

After a signal a worker looks out for the program and ends with it. Before one torch's own watch does
that; it looks at the parent of the worker, which is the program but for a fork server's workers, and
these look out for it from their beginning.
"""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, context, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""The signals that ask a run to end."""

_LOOK_S = 0.1
_END_S = 5.0
_FORK_SERVER_MODULE = "tp_core._data._fork_server"


@contextmanager
def outliving_workers(loader: Any, *, keep: bool) -> Iterator[None]:
    """Let the workers that a ``DataLoader`` starts in this block outlive signals.

    Args:
        loader: Anything; a loader without worker processes is left as it is.
        keep: Whether workers that it starts later on do so, too: for loaders that are ours to change.
    """
    method = _start_method(loader)
    if method is None:
        yield
        return
    before = loader.worker_init_fn, loader.multiprocessing_context
    if isinstance(before[0], _Initializer):
        yield
        return
    _start_helpers(method)
    loader.worker_init_fn = _Initializer(before[0])
    loader.multiprocessing_context = _CONTEXTS[method]
    try:
        yield
    finally:
        if not keep:
            loader.worker_init_fn, loader.multiprocessing_context = before


def _start_method(loader: Any) -> str | None:
    """Return how the loader starts worker processes; None if it has none, or in a way of the user's own."""
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader) or not loader.num_workers or os.name != "posix":
        return None
    given = loader.multiprocessing_context
    process = (given or multiprocessing.get_context()).Process
    return next((name for name, plain in _PLAIN.items() if process is plain), None)


def _start_helpers(method: str) -> None:
    """Start the processes that multiprocessing keeps for itself such that they outlive signals, too."""
    if method == "fork":
        return
    if method == "forkserver":
        from multiprocessing import forkserver

        # No function tells which modules were asked for already.
        preload: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        if _FORK_SERVER_MODULE not in preload:
            forkserver.set_forkserver_preload([*preload, _FORK_SERVER_MODULE])
    with _blocked():
        resource_tracker.ensure_running()
        if method == "forkserver":
            _block()  # what starts the tracker lets some of them through
            forkserver.ensure_running()


def _block() -> set[Any]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS))


@contextmanager
def _blocked() -> Iterator[None]:
    """Hold the signals back from this thread, and from the processes that it starts."""
    before = _block()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Outliving(BaseProcess):
    """A worker process."""

    outlives_signals = True  # the fork server asks

    def start(self) -> None:
        """Start it with the signals blocked."""
        with _blocked():
            super().start()
        popen: Any = self._popen  # type: ignore[attr-defined]
        known = weakref.ref(popen)  # not itself, or its descriptors would wait for the garbage collector
        # Asked for by torch, for a worker that hangs, and by multiprocessing at the end of the program.
        popen.terminate = lambda: _end(known())

    def run(self) -> None:
        """Work, with the signals blocked until torch has set its handlers."""
        _block()
        super().run()


class _ForkWorker(_Outliving, context.ForkProcess):
    pass


class _SpawnWorker(_Outliving, context.SpawnProcess):
    pass


class _ForkServerWorker(_Outliving, context.ForkServerProcess):
    pass


class _ForkContext(context.ForkContext):
    Process = _ForkWorker


class _SpawnContext(context.SpawnContext):
    Process = _SpawnWorker


class _ForkServerContext(context.ForkServerContext):
    Process = _ForkServerWorker


_PLAIN: dict[str, Any] = {
    "fork": context.ForkProcess,
    "spawn": context.SpawnProcess,
    "forkserver": context.ForkServerProcess,
}
_CONTEXTS: dict[str, Any] = {
    "fork": _ForkContext(),
    "spawn": _SpawnContext(),
    "forkserver": _ForkServerContext(),
}


class _Initializer:
    """A loader's ``worker_init_fn``: has the worker ignore the signals, then calls the user's."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker_id: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()  # a worker may be a thread
        follow = _Follow()
        if is_main and follow.is_of_fork_server:
            follow.start()  # torch looks at the server alone, which lives as long as its children
        for number in SIGNALS if is_main else ():
            # torch's handler of SIGTERM, which is not Python's to see, ends the worker. Handlers of
            # the others that a fork has inherited are the user's, or the run's, which knows of it.
            if number == signal.SIGTERM or signal.getsignal(number) in (
                signal.SIG_DFL,
                signal.default_int_handler,
            ):
                signal.signal(number, follow)
                signal.siginterrupt(number, False)
        if self._own is not None:
            self._own(worker_id)
        if is_main:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Follow:
    """A handler that changes nothing, but has the process end with the program from then on."""

    def __init__(self) -> None:
        self._forked_by = os.getppid()
        self._program = multiprocessing.parent_process()
        self._is_looking = False

    @property
    def is_of_fork_server(self) -> bool:
        """Whether another process than the program has forked this one."""
        return self._program is not None and self._program.pid != self._forked_by

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.start()

    def start(self) -> None:
        """Look from now on whether the program is there."""
        if not self._is_looking:
            self._is_looking = True
            threading.Thread(target=self._look, name="tp-worker", daemon=True).start()

    def _look(self) -> None:
        # The sentinel alone would not do: processes that the program forked hold the other end of a fork's.
        while os.getppid() == self._forked_by:
            if self._program is None:
                time.sleep(_LOOK_S)
            elif connection.wait([self._program.sentinel], _LOOK_S):
                break
        os._exit(0)


def _end(popen: Any) -> None:
    """Kill a worker for its parent, which torch would take for a crash if it saw it."""
    if popen is None or popen.returncode is not None:
        return
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_main else None
    try:
        popen.kill()
        popen.wait(_END_S)
    finally:
        if is_main:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
