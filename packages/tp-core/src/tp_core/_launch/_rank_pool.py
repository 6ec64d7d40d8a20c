"""Processes with a deadline that are the ranks of one job on this machine."""

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO, TypeAlias, cast

from tp_core._launch._safe_path import safe_module_path
from tp_core._pickles import dumps_by_value, pickled_by_value
from tp_core.errors import RankFailedError
from tp_core.output import StandardStream, flush_streams

# -- Real ranks with a deadline, for tests and proofs, and free ports for their rendezvous ---------


_LOWEST = 10_000
_BLOCK = 64
"""The number of ports that each process tries in turn before it uses the first one again."""
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"

_calls = count()

# Starting a process asks all others whether they have ended, and an exit status can be read once: of two
# threads that read it at the same time, multiprocessing would report 255 to one.
_asking = threading.Lock()


@contextlib.contextmanager
def _flushing_safely() -> Iterator[None]:
    """Put streams in place of a program's own that raise nothing: multiprocessing flushes both at a start."""
    streams: Any = (StandardStream("stdout"), StandardStream("stderr"))
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def free_port() -> int:
    """Return a TCP port that is free now, and that other processes are unlikely to take.

    It is below the system's ephemeral ports: a connection of any program may take one of those before it is
    used. Processes with neighboring ids choose from blocks of their own.
    """
    blocks = (_first_of_the_system() - _LOWEST) // _BLOCK
    attempts = 0
    if blocks > 0:
        attempts = _BLOCK
    for _ in range(attempts):
        port = _LOWEST + os.getpid() % blocks * _BLOCK + next(_calls) % _BLOCK
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
        return chosen


def _first_of_the_system() -> int:
    try:
        return int(Path(_RANGE).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's default; other systems begin higher


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    Pipe: TypeAlias = Connection[Any, Any]

# torch._dynamo takes a second to import, which every rank would spend at its first optimizer step.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "tp_core.sessions._process_group_session",
    "tp_core.data._loader",
    "torch._dynamo",
]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The result, error or exit status of one rank.

    Attributes:
        rank: The rank.
        value: The function's result, if it returned.
        error: Its error, as a traceback; ``None`` if it returned or was killed.
        exitcode: The process's exit status; minus the signal's number if one killed it; ``None``
            if it was ended at the deadline.
        stacks: The stacks of its threads shortly before that deadline.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    stacks: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode == 0

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.exitcode is None:
            return f"rank {self.rank} had not ended at the deadline\n{self.stacks}".rstrip()
        if self.exitcode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.exitcode).name}"
        return f"rank {self.rank} ended with status {self.exitcode}"


class RankReport(NamedTuple):
    value: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``processes`` ranks and return the results, by rank.

    Every rank is a new process with torchrun's variables, a free port and one thread. It is forked from a
    server that has imported torch, for about 0.03 s of CPU each. The first rank that fails ends the
    others; one that has returned stays until all have. For many short checks that may share a process,
    see :class:`RankPool`.

    Args:
        function: The function of each rank; functions of test modules and lambdas work, too.
        processes: The number of ranks.
        *args: Arguments for the function, the same for each rank.
        timeout_s: The deadline of all ranks, in seconds.
        environ: Further variables for the ranks.

    Raises:
        RankFailedError: A rank raised, died or outlived the deadline; with its traceback, or the stacks of
            all that did not end.
    """
    outcomes = rank_outcomes(function, processes, *args, timeout_s=timeout_s, environ=environ, together=True)
    failed = [o for o in outcomes if not o.ok]
    if failed:
        # One with a traceback explains most, then one that died; the parent ended the others.
        first = min(failed, key=lambda o: (o.error is None, o.exitcode in (None, 0)))
        if first.error is None and first.exitcode is None:
            raise RankFailedError("\n".join(map(str, failed)))
        raise RankFailedError(str(first))
    return [o.value for o in outcomes]


def rank_outcomes(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
    together: bool = False,
) -> list[RankOutcome]:
    """Run ranks as :func:`run_ranks` does, but return all outcomes and raise no errors: for fault tests.

    Unless ``together`` is set, a rank that fails does not end the others.
    """
    payload = dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="tp-ranks-") as folder:
        ranks = start_ranks(
            _run_rank,
            processes,
            environ,
            args=(payload, list(sys.path), folder),
            kwargs={"timeout_s": timeout_s, "stays": together},
        )
        return _collect(ranks, folder, deadline=time.monotonic() + timeout_s, together=together)


def start_ranks(
    target: Callable[..., None],
    processes: int,
    environ: Mapping[str, str] | None,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> "list[tuple[Any, Pipe]]":
    """Start processes that call ``target(pipe, variables, *args, **kwargs)``; return each with its pipe."""
    import multiprocessing  # here, and below: those who ask for a free port alone need none of it

    # A fork server: its children have torch imported, and none of this process's threads or groups.
    # Windows has none: there each rank imports for itself.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    method = "spawn"
    if has_server:
        method = "forkserver"
    context: Any = multiprocessing.get_context(method)
    if has_server:
        # Preload the modules of tp that are loaded here: each rank would import them again.
        ours = sorted(name for name in list(sys.modules) if name.startswith("tp_") and "." in name)
        context.set_forkserver_preload([safe_module_path.__module__, *_PRELOAD, *ours])
    port = str(free_port())
    ranks: list[tuple[Any, Pipe]] = []
    try:
        for rank in range(processes):
            own_end, rank_end = context.Pipe()
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(processes),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(environ or {}),
            }
            process = context.Process(
                target=target, args=(rank_end, variables, *args), kwargs=dict(kwargs), daemon=True
            )
            with _delayed_signals(), _asking, _without_main(), safe_module_path(), _flushing_safely():
                process.start()
                ranks.append((process, own_end))
            rank_end.close()  # else the pipe would not report the end of a rank that died
    except BaseException:
        _end([process for process, _ in ranks])
        raise
    return ranks


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """Let handlers of Ctrl-C and SIGTERM, which may raise, run at the end of the block.

    multiprocessing reads the id of a new process last. An error before that leaves a process that nobody
    knows: it would hang on with this one's output, and the fork server with it
    (test_ctrl_c_while_a_rank_starts_leaves_none). A second signal is not delayed: the server may hang.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}

    def delay(number: int, frame: FrameType | None) -> None:
        restore()
        came.append((number, frame))

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        for which in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(which)
            if callable(handler):  # neither ignored, nor the system's own
                handlers[which] = handler
                signal.signal(which, delay)
        yield
    finally:
        restore()
        for number, frame in came:
            handlers[number](number, frame)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the program's file in the processes that start in this block.

    What ranks call travels by value. A program without a guard of its main would start ranks in ranks.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _collect(
    ranks: "list[tuple[Any, Pipe]]", folder: str, *, deadline: float, together: bool
) -> list[RankOutcome]:
    reports: dict[int, RankReport] = {}
    pending = {reader: rank for rank, (_, reader) in enumerate(ranks)}
    try:
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for reader in cast("list[Pipe]", _wait(list(pending), timeout=left_s)):
                rank = pending.pop(reader)
                try:
                    reports[rank] = pickle.loads(reader.recv_bytes())
                except (EOFError, ConnectionResetError):  # it died without a report
                    reports[rank] = RankReport()
                    if together:
                        pending.clear()
                        break
                if reports[rank].error is not None and together:
                    pending.clear()
                    break
        for _, reader in ranks:
            reader.close()  # ranks that have returned wait for this before they exit
        for rank in reports:
            # The fork server reports the exit status, on a busy machine not at once.
            _exit_status(ranks[rank][0], max(5.0, deadline - time.monotonic()))
        outcomes = []
        for rank, (process, _) in enumerate(ranks):
            report = reports.get(rank, RankReport())
            outcomes.append(RankOutcome(rank, *report, _exit_status(process, 0), _stacks(folder, rank)))
        return outcomes
    finally:
        _end([process for process, _ in ranks])


def _wait(readers: list[Any], timeout: float | None = None) -> list[Any]:
    """Return the pipes and sentinels that are ready."""
    from multiprocessing.connection import wait

    return wait(readers, timeout)


def _exit_status(process: Any, timeout_s: float) -> int | None:
    """Return the exit status of a process, once it has ended; ``None`` if it has not within the timeout."""
    _wait([process.sentinel], timeout_s)
    with _asking:
        status: int | None = process.exitcode
        return status


def _end(processes: list[Any]) -> None:
    """Kill processes that have not ended: they may hang in a collective, and have nothing to save."""
    for process in processes:
        if _exit_status(process, 0) is None:
            process.kill()
    for process in processes:
        _wait([process.sentinel])
        with _asking:
            process.join()  # without a fork server it ends a little after its end of the pipe
        process.close()


def _begin(variables: dict[str, str], path: list[str]) -> None:
    """Begin a rank, in a process that is a copy of the fork server."""
    gc.freeze()  # a full collection would copy all that the server has imported: 0.2 s
    os.environ.update(variables)
    sys.path[:] = path


@contextlib.contextmanager
def _noting_stacks(file: TextIO, timeout_s: float) -> Iterator[None]:
    """Write this rank's stacks into a file just before the deadline, if it has not ended by then.

    Not onto the screen: what the parent says of the hang comes first there, with these stacks or without.
    """
    file.seek(0)
    file.truncate()  # of a call that ended just in time
    faulthandler.dump_traceback_later(max(0.5 * timeout_s, timeout_s - 2.0), file=file)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _stacks(folder: str, rank: int) -> str:
    """Return the stacks that a rank has written; none of one that did not come as far."""
    try:
        return Path(folder, str(rank)).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _run_rank(
    writer: "Pipe",
    variables: dict[str, str],
    payload: bytes,
    path: list[str],
    folder: str,
    *,
    timeout_s: float,
    stays: bool,
) -> None:
    _begin(variables, path)
    faulthandler.enable()  # a rank that crashes prints its stack
    with Path(folder, variables["RANK"]).open("w") as file, _noting_stacks(file, timeout_s):
        import torch

        torch.set_num_threads(1)
        try:
            function, args = pickle.loads(payload)
            data = dumps(RankReport(function(*args)))
        except BaseException:  # noqa: BLE001 - it is reported to the parent
            data, stays = dumps(RankReport(error=traceback.format_exc())), False
    with contextlib.suppress(BrokenPipeError):  # another rank failed first, and the parent stopped reading
        writer.send_bytes(data)
    if stays:
        # Other ranks may still need this process: rank 0 serves their store.
        writer.poll(timeout_s)
    # os._exit: an open process group could hang the interpreter's own exit.
    flush_streams()
    os._exit(0)


def dumps(value: Any) -> bytes:
    """Return a pickle with the contents of test modules by value: other processes cannot import these.

    Without cloudpickle, functions go by name: those of packages alone.
    """
    if find_spec("cloudpickle") is None:
        return pickle.dumps(value)
    # Names alone are looked at: a rank that is forked would copy the memory of each module that it touches.
    last_parts = ((name, name.rpartition(".")[2]) for name in list(sys.modules) if "test" in name)
    of_tests = [name for name, last in last_parts if last.startswith("test_") or last == "conftest"]
    with pickled_by_value([sys.modules[name] for name in of_tests]):
        return dumps_by_value(value)


class RankPool:
    """A pool of real ranks that run one check after another.

    They are started at the first check, and join their process group once, in ``setup``. So a check pays
    for no start. The pool is for checks that may share a process and its groups; others use
    :func:`run_ranks`. A check that fails, hangs or kills a rank ends all ranks, and the next one gets new
    ones.

    Args:
        processes: The number of ranks.
        setup: A function to call once on every rank, before its first check.
        args: Arguments for ``setup``.
        environ: Further variables for the ranks, besides torchrun's.
        timeout_s: The deadline of each check, and of ``setup``, in seconds.

    Example:
        >>> with RankPool(2) as ranks:  # doctest: +SKIP
        ...     assert ranks.run(os.getpid) == ranks.run(os.getpid)
    """

    def __init__(
        self,
        processes: int,
        *,
        setup: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.processes, self.timeout_s = processes, timeout_s
        self._setup, self._args, self._environ = setup, args, environ
        self._ranks: list[tuple[Any, Pipe]] = []
        self._folder = ""  # of the stacks of ranks that hang
        self._remove_folder: Callable[[], Any] = lambda: None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results, by rank.

        Functions of test modules and lambdas work, too.

        Raises:
            RankFailedError: A rank raised, died or outlived the deadline; with its traceback, or the stacks
                of all that did not end.
        """
        payload = dumps((function, args))
        if not self._ranks:
            self._folder = tempfile.mkdtemp(prefix="tp-ranks-")
            # Of a pool that nobody closes, too.
            self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            served = (list(sys.path), self._folder, self.timeout_s)
            self._ranks = start_ranks(_serve, self.processes, self._environ, args=served, kwargs={})
            if self._setup is not None:
                self._call(dumps((self._setup, self._args)))
        return self._call(payload)

    def close(self) -> None:
        """End the ranks; closing twice does nothing."""
        ranks, self._ranks = self._ranks, []
        for _, pipe in ranks:
            pipe.close()
        _end([process for process, _ in ranks])
        self._remove_folder()

    def _call(self, payload: bytes) -> list[Any]:
        try:
            return self._exchange(payload)
        except BaseException:
            self.close()  # after a failure ranks may wait in different collectives
            raise

    def _exchange(self, payload: bytes) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        values: list[Any] = [None] * self.processes
        pending = {}
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send_bytes(payload)
            except BrokenPipeError as error:
                raise RankFailedError(self._how_it_ended(rank)) from error
            pending[pipe] = rank
        while pending:
            ready = _wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = [RankOutcome(r, stacks=_stacks(self._folder, r)) for r in sorted(pending.values())]
                raise RankFailedError("\n".join(map(str, hung)))
            for pipe in cast("list[Pipe]", ready):
                rank = pending.pop(pipe)
                try:
                    report: RankReport = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError) as error:  # it died without a report
                    raise RankFailedError(self._how_it_ended(rank)) from error
                if report.error is not None:
                    raise RankFailedError(str(RankOutcome(rank, error=report.error)))
                values[rank] = report.value
        return values

    def _how_it_ended(self, rank: int) -> str:
        process, _ = self._ranks[rank]
        return str(RankOutcome(rank, exitcode=_exit_status(process, self.timeout_s)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(pipe: "Pipe", variables: dict[str, str], path: list[str], folder: str, timeout_s: float) -> None:
    """Run the functions that come through the pipe, until it is closed."""
    _begin(variables, path)
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    file = Path(folder, variables["RANK"]).open("w")  # noqa: SIM115 - as long as this process
    while True:
        try:
            payload = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            # os._exit: an open process group could hang the interpreter's own exit.
            os._exit(0)
        with _noting_stacks(file, timeout_s):
            try:
                function, args = pickle.loads(payload)
                with warnings.catch_warnings():  # filters of one call are not those of the next
                    data = dumps(RankReport(function(*args)))
            except BaseException:  # noqa: BLE001 - it is reported to the parent
                data = dumps(RankReport(error=traceback.format_exc()))
        flush_streams()
        pipe.send_bytes(data)
