"""The start of a loader, with workers that survive the signals that end a run, and end when the run does.

Schedulers, terminals and launchers signal all processes of a run at once. The training process handles
the signal: it finishes its step and saves, and it needs its workers for that. torch's workers die of
SIGTERM, SIGINT, SIGHUP and SIGUSR1, and the run with them. Our workers ignore these from the start::

    iterate_seeded()  blocks the signals while a worker is started: it begins with them blocked
    initializer   in the worker, after torch has set its handlers: sets ours, calls the user's
                  ``worker_init_fn``, which may set others, and unblocks the signals
    terminate()   in the parent, for a worker that does not end: SIGKILL, as it ignores the others

After a signal a worker watches the program and ends with it. Before a signal torch's own watchdog does
that. It watches the worker's parent, which is the program, except for workers of a fork server. These
watch the program from their start.
"""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, context, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from tp_core._launch._safe_path import safe_module_path
from tp_core.random import seeded

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""The signals that ask a run to end."""

_LOOK_S = 0.1  # between two looks of a worker at the program
_END_S = 5.0  # to reap a killed worker: the parent must not wait without an end
_FORK_SERVER_MODULE = "tp_core.data._fork_server"


def iterate_seeded(loader: Iterable[Any], *, seed: int, epoch: int, is_ours: bool) -> Iterator[Any]:
    """Begin to iterate a loader, in a random state of its own.

    A loader draws a seed for its workers. From the global generator that would change the numbers that
    the model draws.

    Args:
        loader: The loader.
        seed: With the epoch, the seed of that state.
        epoch: The epoch, or the pass.
        is_ours: Whether tp may change the loader.
    """
    if type(loader) in {list, tuple}:  # these draw nothing, and seeding all generators takes 0.1 ms
        return iter(loader)
    with seeded(seed, epoch, 1), outliving_workers(loader, keep=is_ours):
        return iter(loader)


@contextmanager
def outliving_workers(loader: Any, *, keep: bool) -> Iterator[None]:
    """Make the workers that a ``DataLoader`` starts in this block survive signals.

    Args:
        loader: Any loader; one without worker processes is left as it is.
        keep: Whether workers that it starts later survive, too: for loaders that tp may change.
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
    """Return the start method of the loader's worker processes; None without any, or for a user's own."""
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader) or not loader.num_workers or os.name != "posix":
        return None
    context = loader.multiprocessing_context
    process = (context or multiprocessing.get_context()).Process
    return next((name for name, plain in _PLAIN.items() if process is plain), None)


def _start_helpers(method: str) -> None:
    """Start the helper processes of multiprocessing so that they survive signals, too.

    A signal to the whole process group would end them, and the workers that the fork server forked.
    """
    if method == "fork":
        return
    if method == "forkserver":
        from multiprocessing import forkserver

        # Private: no function returns the modules to preload, and setting them replaces the user's.
        preload: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        if _FORK_SERVER_MODULE not in preload:
            forkserver.set_forkserver_preload([*preload, _FORK_SERVER_MODULE])
    with _blocked(), safe_module_path():
        resource_tracker.ensure_running()
        if method == "forkserver":
            _block()  # again: ensure_running of the tracker unblocks some of them
            forkserver.ensure_running()


def _block() -> set[Any]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS))


@contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals in this thread during a block, and in the processes that it starts.

    A process inherits the mask. Without it, a signal before the worker's handlers are set would kill it.
    """
    before = _block()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Outliving(BaseProcess):
    outlives_signals = True  # read by _fork_server in each child

    def start(self) -> None:
        with _blocked():
            super().start()
        popen: Any = self._popen  # type: ignore[attr-defined]
        process = weakref.ref(popen)  # weakly: a cycle would keep its descriptors until garbage collection
        # torch calls it for a worker that hangs, and multiprocessing at exit; both send SIGTERM, which
        # our worker ignores.
        popen.terminate = lambda: _end(process())

    def run(self) -> None:
        """Run the worker with the signals blocked until torch has set its handlers."""
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
    """A ``worker_init_fn`` that makes the worker ignore the signals, then calls the user's own."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker_id: int) -> None:
        # A worker may be a thread; Python sets signal handlers in the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        follow = _Follow()
        if is_main and follow.is_of_fork_server:
            follow.start()  # torch watches only the server, which lives as long as its children
        signals = SIGNALS if is_main else ()
        for number in signals:
            # SIGTERM always: torch's C++ handler, which getsignal() does not show, ends the worker.
            # Other handlers that a fork has inherited are the user's or the run's, and stay.
            if number == signal.SIGTERM or signal.getsignal(number) in (
                signal.SIG_DFL,
                signal.default_int_handler,
            ):
                signal.signal(number, follow)
                # Python's signal() makes system calls fail with EINTR: reads in C code would break.
                signal.siginterrupt(number, False)
        if self._own is not None:
            self._own(worker_id)
        # Last: a signal that came in between is delivered now, to our handler or the user's.
        if is_main:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Follow:
    """A signal handler that does nothing but start a watch: the process ends with the program."""

    def __init__(self) -> None:
        self._forked_by = os.getppid()
        self._program = multiprocessing.parent_process()
        self._is_looking = False

    @property
    def is_of_fork_server(self) -> bool:
        """Whether a process other than the program forked this one."""
        return self._program is not None and self._program.pid != self._forked_by

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.start()

    def start(self) -> None:
        """Start to watch the program, in a thread: the handler must return, so that the worker continues."""
        if not self._is_looking:
            self._is_looking = True
            threading.Thread(target=self._look, name="tp-worker", daemon=True).start()

    def _look(self) -> None:
        # The parent's id too: other forks of the program hold the sentinel's other end, so that it stays
        # silent while one of them lives.
        while os.getppid() == self._forked_by:
            if self._program is None:
                time.sleep(_LOOK_S)
            elif connection.wait([self._program.sentinel], _LOOK_S):
                break
        os._exit(0)  # not sys.exit: that would end this thread alone


def _end(popen: Any) -> None:
    """Kill a worker and wait for it, out of sight of torch's SIGCHLD handler, which would report a crash."""
    if popen is None or popen.returncode is not None:
        return
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    if is_main:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    else:
        before = None
    try:
        popen.kill()
        popen.wait(_END_S)
    finally:
        if is_main:
            # None: the handler was set by C code, which Python cannot set again.
            handler = signal.SIG_DFL if before is None else before
            signal.signal(signal.SIGCHLD, handler)
