"""Run a function on several ranks of real processes, with a deadline."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from tp_core.errors import RankFailedError
from tp_core.testing._ports import free_port

__all__ = ["Pipe", "RankOutcome", "Report", "dumps", "rank_outcomes", "run_ranks", "start_ranks"]

if TYPE_CHECKING:
    Pipe: TypeAlias = Connection[Any, Any]

# The last one takes a second, which every rank would spend at its first optimizer step.
_PRELOAD = ["torch", "torch.distributed.checkpoint", "tp_core.testing", "torch._dynamo"]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: Which one.
        value: What the function returned, if it did.
        error: What it raised, as a traceback; ``None`` if it returned or was killed.
        exitcode: The process's exit status; minus the signal's number if one killed it; ``None``
            if it had to be ended at the deadline.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode == 0

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.exitcode is None:
            return f"rank {self.rank} had not ended at the deadline"
        if self.exitcode < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.exitcode).name}"
        return f"rank {self.rank} ended with status {self.exitcode}"


class Report(NamedTuple):
    """What a rank sends to its parent when its function has ended."""

    value: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    timeout_s: float = 600.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``processes`` ranks and return what each returned, by rank.

    Every rank is a fresh process with the variables of torchrun set, a free port and one thread; it
    is forked from a server that has imported torch, for about 0.03 s of CPU each. The first rank that
    fails ends the others; one that has returned stays until all have. For very many short checks
    that may share a process see :class:`RankPool`.

    Args:
        function: What each rank runs; functions of test modules and lambdas will do.
        processes: How many ranks.
        *args: Arguments for the function, the same for each rank.
        timeout_s: All ranks have to end within so many seconds.
        environ: Further variables for the ranks.

    Raises:
        RankFailedError: A rank raised, died or outlived the deadline; with its traceback.
    """
    outcomes = rank_outcomes(function, processes, *args, timeout_s=timeout_s, environ=environ, together=True)
    failed = [o for o in outcomes if not o.ok]
    if failed:
        # One with a traceback explains most, then one that died; the others were ended because of it.
        first = min(failed, key=lambda o: (o.error is None, o.exitcode in (None, 0)))
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
    """Run as :func:`run_ranks` does, but return how each rank ended, whatever it was: for fault tests.

    Unless they are to end ``together``, each one ends on its own, and none because of another.
    """
    payload = dumps((function, args))
    ranks = start_ranks(
        _run_rank,
        processes,
        environ,
        args=(payload, list(sys.path)),
        kwargs={"timeout_s": timeout_s, "stays": together},
    )
    return _collect(ranks, deadline=time.monotonic() + timeout_s, together=together)


def start_ranks(
    target: Callable[..., None],
    processes: int,
    environ: Mapping[str, str] | None,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> "list[tuple[Any, Pipe]]":
    """Start processes that call ``target(pipe, variables, *args, **kwargs)``; return each with its pipe."""
    context = multiprocessing.get_context("forkserver")
    # What is loaded here, the ranks are going to need; each would import it anew.
    ours = sorted(name for name in sys.modules if name.startswith("tp_") and "." in name)
    context.set_forkserver_preload([*_PRELOAD, *ours])
    port = str(free_port())
    ranks = []
    for rank in range(processes):
        mine, theirs = context.Pipe()
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
            target=target, args=(theirs, variables, *args), kwargs=dict(kwargs), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, mine))
    return ranks


def _collect(ranks: "list[tuple[Any, Pipe]]", *, deadline: float, together: bool) -> list[RankOutcome]:
    reports: dict[int, Report] = {}
    pending = {reader: rank for rank, (_, reader) in enumerate(ranks)}
    try:
        while pending and (left := deadline - time.monotonic()) > 0:
            for reader in cast("list[Pipe]", wait(list(pending), timeout=left)):
                rank = pending.pop(reader)
                try:
                    reports[rank] = pickle.loads(reader.recv_bytes())
                except (EOFError, ConnectionResetError):  # it died without a word
                    reports[rank] = Report()
                    if together:
                        pending.clear()
                        break
                if reports[rank].error is not None and together:
                    pending.clear()
                    break
        for _, reader in ranks:
            reader.close()  # those that have returned may go
        for rank in reports:
            # The server that forked it tells how it ended, on a busy machine not at once.
            ranks[rank][0].join(max(5.0, deadline - time.monotonic()))
        return [
            RankOutcome(rank, *reports.get(rank, Report()), process.exitcode)
            for rank, (process, _) in enumerate(ranks)
        ]
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _run_rank(
    writer: "Pipe",
    variables: dict[str, str],
    payload: bytes,
    path: list[str],
    *,
    timeout_s: float,
    stays: bool,
) -> None:
    os.environ.update(variables)
    sys.path[:] = path
    # A rank that crashes shows its stack, and one that hangs does so just before it is ended.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5 * timeout_s, timeout_s - 2.0))
    import torch

    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        data = dumps(Report(function(*args)))
    except BaseException:  # noqa: BLE001 - it is reported to the parent
        data, stays = dumps(Report(error=traceback.format_exc())), False
    faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(BrokenPipeError):  # another failed first, and the parent reads no more
        writer.send_bytes(data)
    if stays:
        # The others may still need this process: rank 0 holds the store where they meet.
        writer.poll(timeout_s)
    # Straight out: a half-open process group must not hold the end up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def dumps(value: Any) -> bytes:
    """Pickle by value what another process could not import: the contents of test modules."""
    import cloudpickle

    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[-1].startswith("test_") or name.split(".")[-1] == "conftest"
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(value)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return data
