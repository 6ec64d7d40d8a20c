"""What launched this process, read from the environment, and what it was left of the machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from tp_core._launch._slurm import derive_port, expand_counts, expand_hosts, is_step
from tp_core._launch._variables import LauncherVariables, VariableReader

__all__ = ["LaunchEnvironment", "available_cores"]

_TORCHRUN = LauncherVariables(
    names=(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    remedy="start the script with `tp launch -n N script.py` or torchrun, which set them all",
)
_SLURM = LauncherVariables(
    names=(
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_NODELIST",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    remedy="start the script with srun, which sets them all",
)


def available_cores() -> int:
    """Return how many cores this process may use: what taskset, Slurm and containers left to it."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """What launched this process, and its place among the processes of the job.

    The defaults are those of a process that nothing but a shell started.

    Attributes:
        launcher: What started the processes; "torchrun" is everything that sets its variables.
        rank: The number of this process in the job, from 0.
        world_size: How many processes the job has.
        local_rank: The number of this process on its host, from 0.
        local_world_size: How many processes of the job run on this host.
        host_rank: The number of this host in the job, from 0.
        hosts: How many hosts the job has.
        master_address: The host where the ranks meet; ``None`` if it was not given.
        master_port: The port there; ``None`` if it was not given.
        cores: How many CPU cores this process may use.

    Example:
        >>> LaunchEnvironment.read({}).is_distributed
        False
    """

    launcher: Literal["plain", "torchrun", "slurm"] = "plain"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host_rank: int = 0
    hosts: int = 1
    master_address: str | None = None
    master_port: int | None = None
    cores: int = field(default_factory=available_cores)

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read torchrun's variables, or else Slurm's inside a step of srun.

        Args:
            environ: The environment variables; those of this process if ``None``.

        Raises:
            LaunchEnvironmentError: Variables are missing, malformed or contradict each other.
        """
        environ = os.environ if environ is None else environ
        # MASTER_ADDR and MASTER_PORT alone are harmless: many clusters set them for every shell.
        if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls._from_torchrun(_TORCHRUN.reader(environ))
        if is_step(environ):
            return cls._from_slurm(_SLURM.reader(environ))
        return cls()

    @classmethod
    def _from_torchrun(cls, read: VariableReader) -> Self:
        rank, world_size, local_rank = map(read.number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        one = 1 if world_size == 1 else None
        local_world_size = read.number("LOCAL_WORLD_SIZE", default=one)
        on_one_host = local_world_size == world_size
        address, port = _meeting_point(read, required=world_size > 1)
        environment = cls(
            launcher="torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host_rank=read.number("GROUP_RANK", default=0 if on_one_host else None),
            hosts=read.number("GROUP_WORLD_SIZE", default=-(-world_size // max(1, local_world_size))),
            master_address=address,
            master_port=port,
        )
        _check(environment, read, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        return environment

    @classmethod
    def _from_slurm(cls, read: VariableReader) -> Self:
        tasks = "SLURM_STEP_NUM_TASKS"
        if tasks not in read.environ and "SLURM_NTASKS" in read.environ:
            tasks = "SLURM_NTASKS"  # of the whole job: the step's own number is the better one
        world_size = read.number(tasks)
        one = 0 if world_size == 1 else None
        host_rank = read.number("SLURM_NODEID", default=one)
        hosts = read.number("SLURM_STEP_NUM_NODES", default=None if one is None else 1)
        if world_size == 1 or (hosts == 1 and "SLURM_STEP_TASKS_PER_NODE" not in read.environ):
            local_world_size = world_size
        else:
            counts = expand_counts(read.text("SLURM_STEP_TASKS_PER_NODE"))
            if host_rank >= len(counts):
                msg = (
                    f"SLURM_STEP_TASKS_PER_NODE lists {len(counts)} nodes, this is the one with "
                    f"SLURM_NODEID={host_rank}"
                )
                raise read.error(msg)
            local_world_size = counts[host_rank]
        address, port = _slurm_meeting_point(read, required=world_size > 1)
        environment = cls(
            launcher="slurm",
            rank=read.number("SLURM_PROCID"),
            world_size=world_size,
            local_rank=read.number("SLURM_LOCALID", default=one),
            local_world_size=local_world_size,
            host_rank=host_rank,
            hosts=hosts,
            master_address=address,
            master_port=port,
        )
        names = ("SLURM_PROCID", tasks, "SLURM_LOCALID", "the number of tasks on this node")
        _check(environment, read, names)
        return environment

    @property
    def is_distributed(self) -> bool:
        """Whether the job has more than one process."""
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that speaks for the job."""
        return self.rank == 0

    def describe(self) -> str:
        """Return one line for people."""
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        if self.launcher == "plain":
            return f"one process, started without a launcher, {cores}"
        where = f", meeting at {self.master_address}:{self.master_port}" * self.is_distributed
        return (
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
            f"{self.local_world_size}, host {self.host_rank} of {self.hosts}, started by "
            f"{self.launcher}{where}, {cores}"
        )


def _check(environment: LaunchEnvironment, read: VariableReader, names: tuple[str, str, str, str]) -> None:
    """Refuse numbers that contradict each other; ``names`` are those of the first four below."""
    rank, world_size, local_rank, local_world_size = names
    for small, small_name, large, large_name in (
        (environment.rank, rank, environment.world_size, world_size),
        (environment.local_rank, local_rank, environment.local_world_size, local_world_size),
        (environment.host_rank, "the number of this host", environment.hosts, "that of all hosts"),
    ):
        if small >= large:
            msg = f"{small_name} ({small}) must be less than {large_name} ({large})"
            raise read.error(msg)
    if environment.local_world_size > environment.world_size:
        msg = (
            f"{local_world_size} ({environment.local_world_size}) must not be more than "
            f"{world_size} ({environment.world_size})"
        )
        raise read.error(msg)


def _meeting_point(read: VariableReader, *, required: bool) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT; one process needs neither."""
    address = read.text("MASTER_ADDR") if required or "MASTER_ADDR" in read.environ else None
    port = _port(read) if required or "MASTER_PORT" in read.environ else None
    return address, port


def _slurm_meeting_point(read: VariableReader, *, required: bool) -> tuple[str | None, int | None]:
    """Return the same address and port in every task, unless MASTER_ADDR or MASTER_PORT are set."""
    if not required:
        return _meeting_point(read, required=False)
    if "MASTER_ADDR" in read.environ:
        address = read.text("MASTER_ADDR")
    else:
        address = expand_hosts(read.text("SLURM_STEP_NODELIST"))[0]
    if "MASTER_PORT" in read.environ:
        return address, _port(read)
    return address, derive_port(read.number("SLURM_JOB_ID"), read.number("SLURM_STEP_ID"))


def _port(read: VariableReader) -> int:
    port = read.number("MASTER_PORT")
    if not 1 <= port <= 65_535:
        msg = f"MASTER_PORT={port} is not a port; it must be from 1 to 65535"
        raise read.error(msg)
    return port
