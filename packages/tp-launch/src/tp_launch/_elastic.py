"""The start of ranks by torch's elastic launcher.

It imports torch: import it only to start processes.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent
from tp_core.launching import EXIT_REPORT

from tp_launch._addresses import Endpoint
from tp_launch._launch_plan import LaunchPlan
from tp_launch._outcome import exit_report_path
from tp_launch._rank_watch import Attempt, Rank
from tp_launch._rendezvous import BOUND

_LOUD = ("torch.distributed", "torchelastic")
_BOOTSTRAP = Path(__file__).with_name("_bootstrap.py")


class RankLogs(DefaultLogsSpecs):
    """Chooses torch's log files, and reports each attempt just before its processes start."""

    def __init__(
        self, log_dir: str, *, env: dict[str, str], on_attempt: Callable[[Attempt, list[Rank]], None]
    ) -> None:
        super().__init__(log_dir=log_dir, redirects=Std.ALL)
        self._env = env
        self._on_attempt = on_attempt

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the log files of an attempt, and set environment variables of its ranks.

        torch calls it between each rendezvous and the start of the ranks.
        """
        dest = super().reify(envs)
        ranks = []
        for local_rank, env in sorted(envs.items()):
            stderr = Path(dest.stderrs[local_rank])
            env.update(self._env)
            env["TP_RANK_DIR"] = str(stderr.parent)
            env[EXIT_REPORT] = str(exit_report_path(stderr.parent))
            ranks.append(
                Rank(
                    local_rank=local_rank,
                    rank=int(env["RANK"]),
                    directory=stderr.parent,
                    stdout=Path(dest.stdouts[local_rank]),
                    stderr=stderr,
                )
            )
        first = envs[0]
        attempt = Attempt(
            number=int(first["TORCHELASTIC_RESTART_COUNT"]),
            nodes=int(first["GROUP_WORLD_SIZE"]),
            store=Endpoint(first["MASTER_ADDR"], int(first["MASTER_PORT"])),
        )
        self._on_attempt(attempt, ranks)
        return dest


def start_ranks(plan: LaunchPlan, *, logs: RankLogs, is_host: bool | None) -> list[ProcessFailure]:
    """Start the processes of this host and wait for all; return those that failed with no restart left."""
    config = _launch_config(plan, logs=logs, is_host=is_host)
    bootstrap = ["-I", "-S", str(_BOOTSTRAP), str(os.getpid())]
    command = [*bootstrap, sys.executable, "-u", *plan.request.command]
    with _quiet_torch():
        try:
            # torch takes arguments for templates and substitutes names after "$"; "$$" stands for "$".
            launch_agent(config, sys.executable, [word.replace("$", "$$") for word in command])
        except ChildFailedError as error:
            return list(error.failures.values())
    return []


def _launch_config(plan: LaunchPlan, *, logs: RankLogs, is_host: bool | None) -> LaunchConfig:
    request = plan.request
    conf: dict[str, Any] = dict(request.rdzv_conf)
    if plan.backend == "static":
        conf["rank"] = request.node_rank or 0
    elif is_host is not None:
        conf["is_host"] = is_host
    backend = plan.backend
    if plan.bind is not None and backend in BOUND:
        backend = BOUND[backend]
        conf["bind"] = plan.bind
    # torch drops a host that misses three of these; the others then have a rendezvous without it.
    conf.setdefault("keep_alive_interval", max(1, int(request.host_timeout_s / 3)))
    options: dict[str, Any] = {
        "min_nodes": plan.min_nodes,
        "max_nodes": plan.max_nodes,
        "nproc_per_node": plan.nproc,
        "logs_specs": logs,
        "run_id": plan.run_id,
        "rdzv_endpoint": str(plan.endpoint),
        "rdzv_backend": backend,
        "rdzv_configs": conf,
        "max_restarts": request.max_restarts,
        "monitor_interval": request.monitor_interval_s,
        "local_addr": plan.local_addr,
        # No signals: torch would also signal the workers of the ranks' loaders, and would raise in the main
        # thread, where the launcher waits for the ranks to save.
        "signals_to_handle": "",
        "shutdown_timeout": int(request.grace_s),
    }
    names = {field.name for field in fields(LaunchConfig)}  # differ between versions of torch
    return LaunchConfig(**{name: value for name, value in options.items() if name in names})


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence the log lines of torch's launcher, unless LOGLEVEL asks for them."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LOUD)]
    if "LOGLEVEL" in os.environ:
        names = []
    before = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        # torch does not close the log files of processes that exit by themselves.
        warnings.simplefilter("ignore", ResourceWarning)
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)
