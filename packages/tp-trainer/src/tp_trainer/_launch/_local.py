"""The share of this host in a job: its ranks, from the first start to the last end."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tp_trainer._launch._failure import code_name, first_failure
from tp_trainer._launch._herald import Herald
from tp_trainer._launch._hosts import Endpoint, wait_for_endpoint
from tp_trainer._launch._outcome import Outcome, say
from tp_trainer._launch._plan import Plan
from tp_trainer._launch._signals import Stopped
from tp_trainer._launch._tail import Tail
from tp_trainer._launch._watch import Rank, Watch

if TYPE_CHECKING:
    from tp_trainer._launch._elastic import ProcessFailure

_FAILURE_GRACE_S = 5.0  # after a failure nothing useful is left to save, so this is short
_POLL_S = 0.02
_DEAF_S = 2.0  # how long torch's agent may take to notice that its processes have ended
_RENDEZVOUS_TIMEOUT_S = 600.0  # torch's own for joining


class _NoRendezvousError(Exception):
    """Nobody serves the rendezvous."""


class LocalRun:
    """The ranks of one launch on this host, over all restarts.

    Args:
        plan: What to start.
        log_dir: Where the logs of the ranks go.
        on_deaf: Called from a thread, with the end of the launch, when torch's agent waits for a
            rendezvous host that was cut off, and will do so for ever.
    """

    def __init__(self, plan: Plan, *, log_dir: Path, on_deaf: Callable[[Outcome], None]) -> None:
        self._plan = plan
        self._on_deaf = on_deaf
        self._over = threading.Event()
        self._log_dir = log_dir
        self._ranks: dict[int, Rank] = {}
        self._serves = bool(plan.is_host)
        self._herald: Herald | None = None
        own = socket.gethostname()
        self._name = f"{own} ({plan.local_addr})" if plan.local_addr else own
        self._loss = ""  # what was said of a host that was lost, for which the ranks were ended
        self._tail = Tail()
        self._failure_grace_s = min(plan.request.grace_s, _FAILURE_GRACE_S)
        self._watch = Watch(failure_grace_s=self._failure_grace_s)
        self._tail.start()
        self._watch.start()

    @property
    def has_ranks(self) -> bool:
        """Whether processes have been started."""
        return bool(self._ranks)

    def run(self) -> Outcome:
        """Start the ranks and wait for them; a signal is an outcome, too."""
        try:
            outcome = self._run()
        except Stopped as stopped:
            outcome = Outcome.stopped(stopped.signum)
        self._over.set()
        try:
            return self._agreed(outcome)
        except Stopped as stopped:
            return Outcome.stopped(stopped.signum)

    def warn(self, signum: int) -> None:
        """Give every rank a signal, and time to end after it; called from a signal handler."""
        self._watch.tell(signum)
        deadline = time.monotonic() + self._plan.request.grace_s
        while len(self._watch.deaths()) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave no process behind, and show the rest of what they wrote."""
        self._watch.kill_all()
        self._tail.stop()
        self._watch.stop()
        if self._herald is not None:
            self._herald.close()

    def _run(self) -> Outcome:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        try:
            failures = self._start()
        except SignalException as error:  # from torch's handler, which replaced ours
            return Outcome.stopped(error.sigval)
        except _NoRendezvousError as error:
            return Outcome(1, message=str(error))
        except Exception as error:  # noqa: BLE001  # torch's agent: any of its many kinds
            return Outcome(1, message=self._loss or self._broken(error))
        return self._failed(failures) if failures else Outcome(0)

    def _start(self) -> "list[ProcessFailure]":
        from tp_trainer._launch._elastic import RankLogs, RendezvousConnectionError, start_ranks

        plan = self._plan
        logs = RankLogs(str(self._log_dir), env=plan.env, on_attempt=self._on_attempt)
        if plan.is_host is False:
            self._find_host()
        try:
            return start_ranks(plan, logs=logs, is_host=plan.is_host)
        except RendezvousConnectionError:
            # The address is ours but the port is taken: another launch on this machine was first.
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
        if not wait_for_endpoint(endpoint, timeout_s=timeout_s, say=say):
            raise _NoRendezvousError(
                f"nobody answered at {endpoint} within {timeout_s:g} s; start the launch on that "
                "host, and check the address, the port and the firewall. No interface of this "
                "machine has that address: where one should, say --rdzv-conf is_host=1"
            )

    def _on_attempt(self, restart: int, nodes: int, ranks: list[Rank]) -> None:
        if restart and self._ranks:
            ends = [
                f"rank {self._ranks[local].rank} failed with {code_name(death.code)}, "
                for local, death in sorted(self._watch.deaths().items(), key=lambda d: d[1].order)
                if death.code
            ]
            cause = "" if self._loss else "".join(ends[:1])
            hosts = "" if self._plan.max_nodes == 1 else f", on {nodes} host{'s' * (nodes > 1)}"
            say(f"{cause}restart {restart} of {self._plan.request.max_restarts}{hosts}")
        self._loss = ""
        self._ranks = {rank.local_rank: rank for rank in ranks}
        self._watch.follow(ranks)
        for rank in ranks:
            prefix, own = f"[rank{rank.rank}] ", f"[rank{rank.rank}]: "
            self._tail.follow(rank.stdout, prefix=prefix, out=sys.stdout)
            self._tail.follow(rank.stderr, prefix=prefix, out=sys.stderr, drop=own)
        self._listen(nodes)

    def _listen(self, nodes: int) -> None:
        plan = self._plan
        if plan.max_nodes == 1 or plan.is_host is None or not isinstance(plan.endpoint, Endpoint):
            return
        if self._herald is None:
            self._herald = Herald(
                plan.endpoint,
                run_id=plan.run_id,
                serves=self._serves,
                name=self._name,
                timeout_s=plan.request.host_timeout_s,
                on_news=self._watch.end_all,
                on_loss=self._lose,
            )
        self._herald.start(nodes=nodes)

    def _lose(self, text: str, can_go_on: bool) -> None:
        """End the ranks, which wait for those of a lost host; they may be started again without it."""
        self._loss = text
        say(f"{text}; the processes of this host are ended")
        self._watch.end_all()
        if not can_go_on and not self._over.wait(self._failure_grace_s + _DEAF_S):
            self._on_deaf(Outcome(1, message=text))

    def _failed(self, failures: "list[ProcessFailure]") -> Outcome:
        if self._loss:
            return Outcome(1, message=self._loss)
        failure = first_failure(
            {failed.local_rank: (failed.pid, failed.exitcode) for failed in failures},
            ranks=self._ranks,
            deaths=self._watch.deaths(),
            killed=self._watch.killed(),
            keep_logs=self._plan.request.log_dir is not None,
        )
        return Outcome(failure.status, failure=failure)

    def _agreed(self, outcome: Outcome) -> Outcome:
        """What the hosts of the job agree was its end: the first cause that one of them told."""
        if self._herald is None:
            return outcome
        if outcome.status == 0:
            news = self._herald.news()
        elif outcome.stopped_by is not None:
            # An elastic job goes on without this host; any other one is over.
            if self._plan.min_nodes == self._plan.max_nodes:
                self._herald.tell(outcome.to_news(host=self._name), sure=True)
            news = None
        else:
            failure = outcome.failure
            sure = bool(self._loss) or (failure is not None and not failure.is_consequence)
            news = self._herald.tell(outcome.to_news(host="" if self._loss else self._name), sure=sure)
        return outcome if news is None else Outcome.from_news(news)

    def _broken(self, error: Exception) -> str:
        text = str(error).strip() or "no message"
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        said = f"{type(error).__name__}: {text}{cause}"
        if self._ranks:
            return (
                f"the rendezvous at {self._plan.endpoint} was lost: another host of the job has "
                f"ended or failed, see its output; torch said {said}"
            )
        return f"the processes could not be started: {said}; LOGLEVEL=INFO shows what torch's launcher did"
