"""The outcome of a launch: its status, the rank that failed first, and the checkpoint after a signal."""

import signal
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from tp_core.launching import LOST_RANK, ExitReport, read_exit_report, tells_of_lost_rank
from tp_core.output import flush_streams, print_to_stderr

from tp_launch._rank_watch import Rank, RankDeath
from tp_launch._tracebacks import HEAD, exception_of, last_traceback

_TAIL_LINES = 20
_MAX_LINES = 120
_MAX_BYTES = 1 << 18
_THREADS_LEFT = "terminate called without an active exception"  # C++: threads of gloo were still alive
_HINTS = {
    "SIGKILL": "killed from outside; when nobody did, the system was out of memory (see dmesg)",
    "SIGSEGV": "a crash in native code; the stack of Python, if there was time, is below",
    "SIGABRT": "native code gave up, on a failed check or a timeout of a collective",
    "exit": "it had come to its end: call torch.distributed.destroy_process_group() there",
    "SIGBUS": "often a full /dev/shm: data loader workers share memory there",
}
_ASKED = (-signal.SIGTERM, -signal.SIGUSR1)  # the ends of ranks without a handler for the launcher's signals


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """The outcome of a launch: the exit status, and the reason if it is not 0.

    Attributes:
        status: 0, the exit code of the rank that failed first, or 128 + a signal.
        failure: The rank that failed first, if any.
        message: The reason for which nothing ran or the run ended early, if any.
        stopped_by: The signal that ended this launch, if any.
        account: The checkpoint that was saved then, or why none was.
    """

    status: int
    failure: "RankFailure | None" = None
    message: str = ""
    stopped_by: int | None = None
    account: str = ""

    @property
    def state(self) -> Literal["finished", "failed", "stopped"]:
        """Whether a signal "stopped" the launch, it "failed" with a status other than 0, or it "finished"."""
        if self.stopped_by is not None:
            return "stopped"
        if self.status:
            return "failed"
        return "finished"

    @property
    def reason(self) -> str:
        """The reason of a bad end in a line; empty without one."""
        if self.stopped_by is not None:
            return f"{code_name(-self.stopped_by)}; {self.account}"
        if self.failure is not None:
            return f"rank {self.failure.rank}: {code_name(self.failure.code)}"
        if self.status:
            return self.message
        return ""

    @classmethod
    def stopped(cls, signum: int, account: str) -> Self:
        """Return the outcome of a launch that a signal ended."""
        message = f"stopped by {code_name(-signum)}; {account}"
        return cls(128 + signum, message=message, stopped_by=signum, account=account)

    def to_report(self, *, host: str) -> dict[str, Any]:
        """Return the outcome for the other hosts, as values that JSON can hold.

        Args:
            host: The host of the message; "" if the message names it.
        """
        message = self.message
        if host and message:
            message = f"host {host}: {message}"
        failure = None
        if self.failure is not None:
            failure = asdict(self.failure)
        return {"status": self.status, "failure": failure, "message": message}

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """Return the outcome in another host's report."""
        failure = None
        if report["failure"] is not None:
            failure = RankFailure(**report["failure"] | {"shown_by": None})
        return cls(report["status"], failure=failure, message=report["message"])


def report(outcome: LaunchOutcome) -> None:
    """Print the reason of a failed launch on stderr, after everything else."""
    flush_streams()  # the ranks' output comes before the reason
    if outcome.failure is not None:
        print_to_stderr(outcome.failure.brief())
    elif outcome.message:
        print_line(outcome.message)


def print_line(line: str) -> None:
    print_to_stderr(f"tp launch: {line}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The rank that failed first, and its last output.

    Attributes:
        rank: Its rank in the job.
        local_rank: Its rank on its host.
        pid: Its process id there.
        host: The name of its host.
        code: Its exit code; negative for a signal.
        text: The traceback, or the tail of its stderr.
        is_traceback: Whether ``text`` is a traceback.
        is_consequence: Whether the text only reports the loss of another process.
        others: The ends of the other ranks of its host.
        exited: The ranks of its host that had exited before it, with status 0.
        log: The path of its stderr log, if the logs are kept.
        shown_by: The rank whose lines in the output of this launch show the traceback; ``None`` if none do.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    code: int
    text: str
    is_traceback: bool
    is_consequence: bool
    others: str
    exited: tuple[int, ...] = ()
    log: str | None = None
    shown_by: int | None = None

    @property
    def status(self) -> int:
        """The exit status as in a shell, the exit code or 128 + the signal."""
        if self.code >= 0:
            return self.code
        return 128 - self.code

    def brief(self) -> str:
        """Return the block with a line in place of a traceback that the lines of a rank have shown."""
        if self.shown_by is None or HEAD not in self.text:
            return str(self)
        exception = exception_of(self.text).partition("\n")[0]
        return self._block(f"{exception}\n(the traceback is above, in the lines of [rank{self.shown_by}])")

    def __str__(self) -> str:
        """Return the block that ends the launch's output."""
        return self._block(self.text)

    def _block(self, text: str) -> str:
        name = code_name(self.code)
        noun = "ranks" if len(self.exited) > 1 else "rank"
        exited = f"{noun} {', '.join(map(str, self.exited))}"
        # A rank that only reports a lost peer is not the cause if a peer has exited.
        is_peer_missing = bool(self.exited) and self.is_consequence
        if is_peer_missing:
            title = f"{exited} left first, with exit code 0; then rank {self.rank} failed"
        else:
            title = f"rank {self.rank} failed first"
        lines = [
            "=" * 72,
            f"{title}: {name}, status {self.status}",
            f"  where   host {self.host}, local rank {self.local_rank}, pid {self.pid}",
        ]
        kind = "exit" if _THREADS_LEFT in self.text else name
        hint = _HINTS.get(kind)
        if hint and HEAD not in self.text:  # a traceback explains more than the hint
            lines.append(f"  hint    {hint}")
        if is_peer_missing:
            lines.append(
                f"  cause   likely the end of {exited}: look for what ends a process in mid-run there, "
                "or for a call of all ranks (export, evaluate, reduce) under `if trainer.is_main`"
            )
        elif self.exited:
            lines.append(f"  before  {exited} had ended with exit code 0")
        if self.others:
            lines.append(f"  others  {self.others}")
        if self.log is not None:
            lines.append(f"  log     {self.log}")
        if text:
            if self.is_traceback:
                title = ""
            else:
                title = "  the end of its stderr:"
            lines.append(title)
            lines += [f"  {line}".rstrip() for line in text.splitlines()]
        else:
            lines.append("  it wrote nothing to stderr")
        return "\n".join([*lines, "=" * 72])


def code_name(code: int) -> str:
    """Return ``exit code 3`` or the name of a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def first_failure(
    codes: Mapping[int, tuple[int, int]],
    *,
    ranks: Mapping[int, Rank],
    deaths: Mapping[int, RankDeath],
    killed: set[int],
    keep_logs: bool,
) -> RankFailure:
    """Return the rank that ended first and so caused the others' ends.

    ``codes`` has the process id and the exit code of each rank that failed, in torch's order. Ranks in
    ``killed`` did not end in time.
    """
    tails = {local: _stderr_tail(ranks[local], code) for local, (_, code) in codes.items()}

    def lateness(local: int) -> tuple[bool, bool, int, int]:
        # Ranks that the launcher ended, or that only report that a peer is gone, come after the others.
        ended_by_us = local in killed or codes[local][1] == -signal.SIGTERM
        order = deaths[local].order if local in deaths else len(ranks)
        return ended_by_us, tails[local].is_consequence, order, list(codes).index(local)

    local = min(codes, key=lateness)
    pid, code = codes[local]
    order = deaths[local].order if local in deaths else len(ranks)
    exited = []
    for other, death in deaths.items():
        # If torch collected the status and reports no failure, it was 0.
        has_succeeded = death.code == 0 or (death.code is None and other not in codes)
        if has_succeeded and death.order < order:
            exited.append(ranks[other].rank)
    tail = tails[local]
    log = str(ranks[local].stderr) if keep_logs else None
    return RankFailure(
        rank=ranks[local].rank,
        local_rank=local,
        pid=pid,
        host=socket.gethostname(),
        code=code,
        text=tail.text,
        is_traceback=tail.is_traceback,
        is_consequence=tail.is_consequence,
        others=_others(codes, ranks=ranks, killed=killed, first=local),
        exited=tuple(sorted(exited)),
        log=log,
    )


class _StderrTail(NamedTuple):
    """The end of a rank's stderr: its traceback, if it has one, and whether that blames another rank."""

    text: str
    is_traceback: bool = False
    is_consequence: bool = False


def _stderr_tail(rank: Rank, code: int) -> _StderrTail:
    try:
        with rank.stderr.open("rb") as file:
            # Only the end: days of logs may be gigabytes.
            file.seek(max(0, rank.stderr.stat().st_size - _MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    own = f"[rank{rank.rank}]: "  # torch's prefix on the lines of a traceback
    text = "\n".join(line.removeprefix(own) for line in text.splitlines()).strip("\n")
    lost = [line for line in text.splitlines() if line.startswith(LOST_RANK)]
    if lost and (code > 0 or code == -signal.SIGABRT):
        return _StderrTail(lost[-1], is_traceback=True, is_consequence=True)
    if code > 0:
        stack = last_traceback(text)
    elif code == -signal.SIGABRT:
        # An uncaught exception ends in an abort if threads of a collective are still alive.
        stack = last_traceback(text) or _native_stack(text, before=_TAIL_LINES)
    else:
        # A killed rank prints nothing: a traceback in its log is of an exception that it survived.
        stack = _native_stack(text)
    if stack:
        is_consequence = tells_of_lost_rank(exception_of(stack))
        return _StderrTail(_shortened(stack), is_traceback=True, is_consequence=is_consequence)
    return _StderrTail("\n".join(text.splitlines()[-_TAIL_LINES:]))


def _native_stack(text: str, *, before: int = 0) -> str:
    """Return the stack that faulthandler writes at a crash in native code, and some lines before it."""
    lines = text.splitlines()
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not fatal:
        return ""
    shown = lines[max(0, fatal[-1] - before) :]
    return "\n".join(line for line in shown if not line.startswith("Extension modules:")).strip()


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= _MAX_LINES:
        return text
    half = _MAX_LINES // 2
    left_out = f"... {len(lines) - 2 * half} lines left out ..."
    return "\n".join([*lines[:half], left_out, *lines[-half:]])


def _others(
    codes: Mapping[int, tuple[int, int]], *, ranks: Mapping[int, Rank], killed: set[int], first: int
) -> str:
    parts = []
    for local, rank in sorted(ranks.items()):
        if local == first or local not in codes:
            continue
        code = codes[local][1]
        if local in killed:
            how = "killed by tp launch: it did not end when asked"
        elif code == -signal.SIGTERM:
            how = "ended by tp launch"
        else:
            how = code_name(code)
        parts.append(f"rank {rank.rank} {how}")
    if len(parts) > 4:
        parts = [*parts[:4], f"and {len(parts) - 4} more"]
    return "; ".join(parts)


def exit_report_path(directory: Path) -> Path:
    return directory / "end.json"


def reported_exit(rank: Rank, code: int | None) -> ExitReport | None:
    """Return a rank's report of its end by a signal, if its exit code matches the signal."""
    end = read_exit_report(exit_report_path(rank.directory))
    if end is not None and end.signal and code == 128 + end.signal:
        return end
    return None


def account(
    ranks: Iterable[Rank],
    *,
    deaths: Mapping[int, RankDeath],
    killed: Collection[int],
    grace_s: float,
    is_hurried: bool,
) -> str:
    """Return a line about the checkpoint that a launch has saved after a signal, or why there is none.

    Args:
        ranks: The ranks.
        deaths: How they ended, by local rank.
        killed: The local ranks that the launch has killed.
        grace_s: How long they had to end.
        is_hurried: Whether they were killed at a second Ctrl-C, and had not so long.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    newest = None  # of the checkpoints before the signal
    for rank in ranks:
        end = read_exit_report(exit_report_path(rank.directory))
        if end is not None and end.saved is not None:
            if end.signal:
                return f"saved: {end.saved}"
            newest = newest or end.saved
    if not ranks:
        return "nothing was saved: no rank had been started"
    if newest is None:
        before = "fit has saved no checkpoint before"
    else:
        before = f"the newest checkpoint is {newest}"
    if killed:
        slow = next(rank for rank in ranks if rank.local_rank in killed)
        how = f"had not ended after {grace_s:g} s and was killed"
        if is_hurried:
            how = "was killed at the second Ctrl-C, before it had ended"
        return f"nothing was saved by fit: rank {slow.rank} {how}; {before}"
    # A rank that failed explains more than one that ran until the signal.
    codes = {rank.rank: deaths[rank.local_rank].code for rank in ranks if rank.local_rank in deaths}
    number = next((n for n, code in codes.items() if code not in (None, 0, *_ASKED)), ranks[0].rank)
    code = codes.get(number)
    if code is None:
        how = "has ended"
    elif code in _ASKED:
        how = f"was outside of a fit with checkpoints, where {code_name(code)} ends it at once"
    elif code >= 0:
        how = f"ended with {code_name(code)}"
    else:
        how = f"was ended by {code_name(code)}"
    line = f"nothing was saved by fit: rank {number} {how}"
    if newest is None:
        return line
    return f"{line}; {before}"
