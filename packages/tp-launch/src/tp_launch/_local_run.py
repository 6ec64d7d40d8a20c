"""The run of a request: plan, start and watch the ranks of this host, report the outcome."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tp_core.launching import available_cores
from tp_core.output import StandardStream

from tp_launch._addresses import Endpoint, wait_for_endpoint
from tp_launch._host_watch import FailureBroadcast, JobHost
from tp_launch._launch_plan import LaunchPlan, LaunchRequest, make_plan
from tp_launch._outcome import (
    LaunchOutcome,
    account,
    code_name,
    first_failure,
    print_line,
    report,
    reported_exit,
)
from tp_launch._rank_logs import LogTail, TemporaryLogs
from tp_launch._rank_watch import Attempt, ExitedRanks, Rank, RankWatch
from tp_launch._stop_signals import Stopped, StopSignals
from tp_launch._tracebacks import RankErrors

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


_TEARDOWN_S = 15.0  # the most from the end of the last rank to the end of the launch
_FAILURE_GRACE_S = 5.0  # short: after a failure there is nothing useful to save
_POLL_S = 0.02
_START_S = 5.0  # how long a process may take to report its id
_UNRESPONSIVE_S = 2.0  # how long torch's agent may take to notice that its processes have ended
_RENDEZVOUS_TIMEOUT_S = 600.0  # torch's own for joining
_ANSWER_S = 60.0  # torch's own for reading


def execute(request: LaunchRequest, *, is_program: bool = True) -> LaunchOutcome:
    """Run a program on the requested processes, and wait for them.

    The ranks' output appears on stdout and stderr, each line with its rank in front.

    Args:
        request: The request.
        is_program: Whether this process exists for the launch alone. It then prints its choices, and exits
            on a signal even if its main thread is stuck in native code.

    Raises:
        ConfigError: The request cannot work; nothing was started.
    """
    plan = make_plan(request)
    if is_program and "OMP_NUM_THREADS" in plan.env:
        threads = plan.env["OMP_NUM_THREADS"]
        print_line(
            f"OMP_NUM_THREADS={threads} for each process ({available_cores()} cores, {plan.nproc} processes)"
        )
    logs: TemporaryLogs | None = None
    if request.log_dir is not None:
        log_dir = Path(request.log_dir)
    else:
        logs = TemporaryLogs()
        log_dir = logs.path

    def leave(outcome: LaunchOutcome) -> None:
        # Called from a thread: the main thread is stuck in native code, and sys.exit() would wait for it.
        clean()
        report(outcome)
        os._exit(outcome.status)

    def leave_stopped(signum: int) -> None:
        local.end(signum)
        leave(local.stopped(signum))

    local = LocalRun(plan, log_dir=log_dir.absolute(), on_unresponsive=leave)

    def clean() -> None:
        local.close()
        if logs is not None:
            logs.remove()

    on_unresponsive = leave_stopped if is_program else None
    with StopSignals(
        on_stop=local.end,
        on_hurry=local.hurry,
        on_unresponsive=on_unresponsive,
        grace_s=request.grace_s + _TEARDOWN_S,
    ) as signals:
        try:
            return local.run()
        except Stopped as stopped:  # outside of the try blocks in `run`
            return local.stopped(stopped.signum)
        finally:
            signals.ignore()  # a Ctrl-C in clean() would leave processes and logs behind
            clean()


class _NoRendezvousError(Exception):
    """Raised when no host serves the rendezvous."""


class LocalRun:
    """Starts and ends the ranks of one launch on this host, over all restarts.

    Args:
        on_unresponsive: Called from a thread, with the outcome, if torch's agent waits for a lost rendezvous
            host: it would wait forever.
    """

    def __init__(
        self, plan: LaunchPlan, *, log_dir: Path, on_unresponsive: Callable[[LaunchOutcome], None]
    ) -> None:
        self._plan = plan
        self._log_dir = log_dir
        self._on_unresponsive = on_unresponsive
        self._over = threading.Event()
        self._is_hurried = False
        # The ranks of this host, by local rank, and those who watch them.
        self._ranks: dict[int, Rank] = {}
        self._failure_grace_s = min(plan.request.grace_s, _FAILURE_GRACE_S)
        self._watch = RankWatch(failure_grace_s=self._failure_grace_s)
        self._exited_ranks = ExitedRanks(self._watch.deaths)
        self._tail = LogTail()
        self._errors: RankErrors | None = None  # of the current attempt
        # The other hosts: whether this one serves their rendezvous, and the message about a lost one.
        self._serves = bool(plan.is_host)
        self._broadcast: FailureBroadcast | None = None
        self._loss = ""  # set if the loss ended the ranks
        self._name = socket.gethostname()
        if plan.local_addr:
            self._name += f" ({plan.local_addr})"
        self._tail.start()
        self._watch.start()

    def run(self) -> LaunchOutcome:
        try:
            outcome = self._run()
        except Stopped as stopped:
            outcome = self.stopped(stopped.signum)
        self._over.set()
        try:
            return self._agree_with_hosts(outcome)
        except Stopped as stopped:
            return self.stopped(stopped.signum)

    def end(self, signum: int) -> None:
        """Ask every rank to end, give it time to save, then kill it; called from a signal handler.

        SIGUSR1, a scheduler's warning, is passed on; other signals become SIGTERM.
        """
        # In the handler, before it raises: torch's agent kills the ranks when an exception passes through it.
        if signum == signal.SIGUSR1:
            passed_on = signum
        else:
            passed_on = signal.SIGTERM
        self._watch.signal(passed_on)
        self._wait_for_ends(self._plan.request.grace_s)
        if len(self._watch.deaths()) < len(self._ranks):
            self.kill()
            self._wait_for_ends(_UNRESPONSIVE_S)

    def hurry(self) -> None:
        """Kill the ranks at once, at a second Ctrl-C."""
        self._is_hurried = True
        self.kill()

    def kill(self) -> None:
        self._watch.kill_all()

    def stopped(self, signum: int) -> LaunchOutcome:
        """Return the outcome of this launch after a signal, with the saved checkpoint."""
        checkpoint = account(
            self._ranks.values(),
            deaths=self._watch.deaths(),
            killed=self._watch.killed(),
            grace_s=self._plan.request.grace_s,
            is_hurried=self._is_hurried,
        )
        return LaunchOutcome.stopped(signum, checkpoint)

    def _wait_for_ends(self, limit_s: float) -> None:
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < limit_s:
            expected = len(self._ranks)
            if waited_s >= _START_S:
                # The signal may have come before torch started some ranks: those never report a process id.
                expected = self._watch.started()
            if len(self._watch.deaths()) >= expected:
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Kill the remaining ranks, show the rest of their output, and end all threads."""
        self._watch.kill_all()  # first: the logs must be complete when the tail shows their end
        self._exited_ranks.close()
        self._tail.stop()
        self._watch.stop()
        if self._broadcast is not None:
            self._broadcast.close()

    def _run(self) -> LaunchOutcome:
        try:
            failures = self._start()
        except _NoRendezvousError as error:
            return LaunchOutcome(1, message=str(error))
        except Exception as error:  # noqa: BLE001 - torch's agent raises many kinds
            return LaunchOutcome(1, message=self._loss or self._explain(error))
        if not failures:
            return LaunchOutcome(0)
        return self._outcome_of(failures)

    def _start(self) -> "list[ProcessFailure]":
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

        from tp_launch._elastic import RankLogs, start_ranks

        plan = self._plan
        logs = RankLogs(str(self._log_dir), env=plan.env, on_attempt=self._on_attempt)
        if plan.is_host is False:
            self._find_host()
        try:
            return start_ranks(plan, logs=logs, is_host=plan.is_host)
        except RendezvousConnectionError:
            # The address is this machine's, but the port is taken: another launch here was first.
            if not (plan.is_host and plan.may_follow and not self._ranks):
                raise
            self._serves = False
            self._find_host()
            return start_ranks(plan, logs=logs, is_host=False)

    def _find_host(self) -> None:
        endpoint = self._plan.endpoint
        if not isinstance(endpoint, Endpoint):
            return
        timeout_s = float(self._plan.request.rdzv_conf.get("timeout", _RENDEZVOUS_TIMEOUT_S))
        if not wait_for_endpoint(endpoint, timeout_s=timeout_s, log=print_line):
            msg = (
                f"nobody answered at {endpoint} within {timeout_s:g} s; start the launch on that "
                "host, and check the address, the port and the firewall. No interface of this "
                "machine has that address: where one should, say --rdzv-conf is_host=1"
            )
            raise _NoRendezvousError(msg)
        from tp_launch._rendezvous import answers

        if not answers(endpoint, timeout_s=min(timeout_s, _ANSWER_S), log=print_line):
            msg = (
                f"something listens at {endpoint}, and did not answer as the rendezvous of a launch; "
                "give another port, or end that program"
            )
            raise _NoRendezvousError(msg)

    def _on_attempt(self, attempt: Attempt, ranks: list[Rank]) -> None:
        if attempt.number and self._ranks:
            self._print_restart(attempt)
        self._loss = ""
        self._ranks = {rank.local_rank: rank for rank in ranks}
        self._watch.follow(ranks)
        self._exited_ranks.follow(attempt, self._ranks)
        if os.environ.get("TP_TRACEBACK") != "full":
            self._errors = RankErrors()
        for rank in ranks:
            prefix = f"[rank{rank.rank}] "
            own = f"[rank{rank.rank}]: "  # torch's prefix of a traceback's lines
            self._tail.follow(rank.stdout, prefix=prefix, out=StandardStream("stdout"))
            self._tail.follow(
                rank.stderr,
                prefix=prefix,
                out=StandardStream("stderr"),
                drop=own,
                rank=rank.rank,
                errors=self._errors,
            )
        self._join_broadcast(attempt.nodes)

    def _print_restart(self, attempt: Attempt) -> None:
        cause = "" if self._loss else self._cause()
        line = f"{cause}restart {attempt.number} of {self._plan.request.max_restarts}"
        if self._plan.max_nodes > 1:
            noun = "host" if attempt.nodes == 1 else "hosts"
            line += f", on {attempt.nodes} {noun}"
        print_line(line)

    def _cause(self) -> str:
        """Return the start of a sentence about the rank that ended an attempt; empty if unknown."""
        self._watch.check()
        deaths = sorted(self._watch.deaths().items(), key=lambda item: item[1].order)
        for local_rank, death in deaths:
            if death.code:
                return f"rank {self._ranks[local_rank].rank} failed with {code_name(death.code)}, "
        # torch collected these statuses first, and hides them.
        unknown = [local_rank for local_rank, death in deaths if death.code is None]
        if len(unknown) == 1:
            return f"rank {self._ranks[unknown[0]].rank} failed, "
        return ""

    def _join_broadcast(self, nodes: int) -> None:
        plan = self._plan
        if plan.max_nodes == 1 or plan.is_host is None or not isinstance(plan.endpoint, Endpoint):
            return
        if self._broadcast is None:
            host = JobHost(
                endpoint=plan.endpoint,
                run_id=plan.run_id,
                name=self._name,
                serves=self._serves,
                timeout_s=plan.request.host_timeout_s,
            )
            self._broadcast = FailureBroadcast(
                host, on_report=self._watch.end_all, on_loss=self._end_after_loss
            )
        self._broadcast.start(nodes=nodes)

    def _end_after_loss(self, message: str, can_continue: bool) -> None:
        """End the ranks, which wait for ranks of a lost host; torch may restart them without that host."""
        self._loss = message
        print_line(f"{message}; the processes of this host are ended")
        self._watch.end_all()
        if not can_continue and not self._over.wait(self._failure_grace_s + _UNRESPONSIVE_S):
            self._on_unresponsive(LaunchOutcome(1, message=message))

    def _outcome_of(self, failures: "list[ProcessFailure]") -> LaunchOutcome:
        if self._loss:
            return LaunchOutcome(1, message=self._loss)
        codes = {failed.local_rank: (failed.pid, failed.exitcode) for failed in failures}
        for local_rank, (_, code) in codes.items():
            end = reported_exit(self._ranks[local_rank], code)
            if end is not None:  # the signal was sent to the ranks, and not to the launch
                return LaunchOutcome(code, message=f"ended by {code_name(-end.signal)}; saved: {end.saved}")
        failure = first_failure(
            codes,
            ranks=self._ranks,
            deaths=self._watch.deaths(),
            killed=self._watch.killed(),
            keep_logs=self._plan.request.log_dir is not None,
        )
        if self._errors is not None:
            self._tail.drain()  # what the lines show is known once all of them are there
            failure = replace(failure, shown_by=self._errors.shown_by(failure.rank))
        return LaunchOutcome(failure.status, failure=failure)

    def _agree_with_hosts(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Return the outcome of all hosts: the first reported failure, or this host's outcome."""
        if self._broadcast is None:
            return outcome
        if outcome.status == 0:
            report = self._broadcast.received()
        elif outcome.stopped_by is not None:
            # A job of fixed size is over; an elastic one continues without this host.
            if self._plan.min_nodes == self._plan.max_nodes:
                self._broadcast.report(outcome.to_report(host=self._name), sure=True)
            report = None
        else:
            failure = outcome.failure
            sure = bool(self._loss) or (failure is not None and not failure.is_consequence)
            host = "" if self._loss else self._name
            report = self._broadcast.report(outcome.to_report(host=host), sure=sure)
        if report is None:
            return outcome
        return LaunchOutcome.from_report(report)

    def _explain(self, error: Exception) -> str:
        text = str(error).strip() or "no message"
        if error.__cause__ is not None:
            cause = f" ({error.__cause__})"
        else:
            cause = ""
        described = f"{type(error).__name__}: {text}{cause}"
        if self._ranks:
            return (
                f"the rendezvous at {self._plan.endpoint} was lost: another host of the job has "
                f"ended or failed, see its output; torch said {described}"
            )
        return (
            f"the processes could not be started: {described}; LOGLEVEL=INFO shows what torch's launcher did"
        )
