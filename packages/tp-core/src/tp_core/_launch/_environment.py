"""The launcher of this process and its ranks, read from the environment, and the cores it may use."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Self

from tp_core._launch._cores import available_cores
from tp_core.errors import ConfigError, LaunchEnvironmentError

ON_TERMINAL = "TP_ON_TERMINAL"
"""The environment variable that is set where the launcher shows the lines of the ranks on a terminal.

What a rank writes after a carriage return is shown in the place of what it has written before it.
"""

# -- Launchers' variables -------------------------------------------------------------------------


class VariableReader(NamedTuple):
    environ: Mapping[str, str]
    names: tuple[str, ...]  # of the launcher's variables
    remedy: str

    def text(self, name: str) -> str:
        value = self.environ.get(name, "").strip()
        if not value:
            if name in self.environ:
                problem = "is empty"
            else:
                problem = "is not set"
            msg = f"{name} {problem}"
            raise self.error(msg)
        return value

    def number(self, name: str, *, default: int | None = None) -> int:
        """Return a variable as a whole number of at least 0."""
        if default is not None and name not in self.environ:
            return default
        value = self.text(name)
        if not value.isdecimal():
            msg = f"{name}={value!r} is not a whole number of at least 0"
            raise self.error(msg)
        return int(value)

    def error(self, problem: str) -> LaunchEnvironmentError:
        names = [name for name in self.names if name in self.environ]
        values = ", ".join(f"{name}={self.environ[name]!r}" for name in names)
        unset = " ".join(name for name in names if not name.startswith("MASTER_"))
        msg = f"{problem}; found {values}; {self.remedy}, or run `unset {unset}` for a process by itself"
        return LaunchEnvironmentError(msg)


# -- Slurm's variables ----------------------------------------------------------------------------


_SPECIAL_STEPS = 0xFFFF_FFF0
"""Step numbers from here on are not steps of srun: the batch script, the shell of salloc, the step that
adopts ssh logins (slurm.h)."""

_FIRST_PORT, _PORTS = 15_000, 16_384  # below Linux' ephemeral ports, which begin at 32,768


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task, and not sbatch a script or salloc a shell."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < _SPECIAL_STEPS


def expand_counts(text: str) -> list[int]:
    """Return one count per node from Slurm's short form.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            msg = f"{text!r} is not a list of tasks per node; it should look like '2(x3),1'"
            raise LaunchEnvironmentError(msg)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Return the host names of Slurm's short form.

    Example:
        >>> expand_hosts("node[001-003,7],gpu1")
        ['node001', 'node002', 'node003', 'node7', 'gpu1']
    """
    words = re.findall(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+", text)
    if not words or ",".join(words) != text.strip():
        raise _bad_hosts(text)
    return [host for word in words for host in _expand_word(word, text)]


def _expand_word(word: str, text: str) -> list[str]:
    head, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, tail = rest.partition("]")
    tails = _expand_word(tail, text)
    hosts: list[str] = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _bad_hosts(text)
        width = len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            hosts += [f"{head}{number:0{width}d}{end}" for end in tails]
    return hosts


def _bad_hosts(text: str) -> LaunchEnvironmentError:
    msg = f"{text!r} is not a list of hosts; it should look like 'node[001-004,7],gpu1'"
    return LaunchEnvironmentError(msg)


def derive_port(job: int, step: int) -> int:
    """Return a port that all tasks of a step compute, and that rarely collides with other steps'."""
    return _FIRST_PORT + (job * 97 + step) % _PORTS


# -- The launch environment -----------------------------------------------------------------------


_TORCHRUN = partial(
    VariableReader,
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
    remedy=(
        "start the script with `tp launch -n N script.py` (pip install tp-launch) or torchrun, which set "
        "them all"
    ),
)
_SLURM = partial(
    VariableReader,
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


@dataclass(frozen=True, slots=True)
class LaunchEnvironment:
    """The launcher of this process, and its ranks in the job.

    The defaults describe a process that was started without a launcher.

    Attributes:
        launcher: The launcher; "torchrun" is everything that sets its variables.
        rank: The rank of this process in the job, from 0.
        world_size: The number of processes of the job.
        local_rank: The rank of this process on its host, from 0.
        local_world_size: The number of processes of the job on this host.
        host_rank: The rank of this host in the job, from 0.
        hosts: The number of hosts of the job.
        master_address: The host of the rendezvous; ``None`` if it was not given.
        master_port: The port of the rendezvous; ``None`` if it was not given.
        cores: The number of CPU cores that this process may use.

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
        """Read torchrun's variables, or Slurm's in a step of srun.

        Args:
            environ: The environment variables; those of this process if ``None``.

        Raises:
            LaunchEnvironmentError: Variables are missing, malformed or contradict each other.
        """
        environ = os.environ if environ is None else environ
        # MASTER_ADDR and MASTER_PORT alone are harmless: many clusters set them for every shell.
        if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return cls._from_torchrun(_TORCHRUN(environ))
        if is_step(environ):
            return cls._from_slurm(_SLURM(environ))
        return cls()

    @classmethod
    def _from_torchrun(cls, read: VariableReader) -> Self:
        rank, world_size, local_rank = map(read.number, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        default_size = 1 if world_size == 1 else None
        local_world_size = read.number("LOCAL_WORLD_SIZE", default=default_size)
        default_host = 0 if local_world_size == world_size else None
        address, port = _rendezvous(read, required=world_size > 1)
        environment = cls(
            launcher="torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host_rank=read.number("GROUP_RANK", default=default_host),
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
            tasks = "SLURM_NTASKS"  # only a fallback: it counts the whole job, not the step
        world_size = read.number(tasks)
        default_rank, default_hosts = (0, 1) if world_size == 1 else (None, None)
        host_rank = read.number("SLURM_NODEID", default=default_rank)
        hosts = read.number("SLURM_STEP_NUM_NODES", default=default_hosts)
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
        address, port = _slurm_rendezvous(read, required=world_size > 1)
        environment = cls(
            launcher="slurm",
            rank=read.number("SLURM_PROCID"),
            world_size=world_size,
            local_rank=read.number("SLURM_LOCALID", default=default_rank),
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
        """Whether this is rank 0, the process that prints and writes for the job."""
        return self.rank == 0

    def describe(self) -> str:
        """Return one line for people."""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        if self.launcher == "plain":
            return f"one process, started without a launcher, {cores}"
        where = f", meeting at {self.master_address}:{self.master_port}" * self.is_distributed
        return (
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
            f"{self.local_world_size}, host {self.host_rank} of {self.hosts}, started by "
            f"{self.launcher}{where}, {cores}"
        )


def _check(environment: LaunchEnvironment, read: VariableReader, names: tuple[str, str, str, str]) -> None:
    """Raise an error for numbers that contradict each other; ``names`` names the first four in messages."""
    rank, world_size, local_rank, local_world_size = names
    for small, small_name, large, large_name in (
        (environment.rank, rank, environment.world_size, world_size),
        (environment.local_rank, local_rank, environment.local_world_size, local_world_size),
        (environment.host_rank, "the number of this host", environment.hosts, "the number of all hosts"),
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


def _rendezvous(read: VariableReader, *, required: bool) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT; one process needs neither."""
    if required or "MASTER_ADDR" in read.environ:
        address = read.text("MASTER_ADDR")
    else:
        address = None
    if required or "MASTER_PORT" in read.environ:
        port = _port(read)
    else:
        port = None
    return address, port


def _slurm_rendezvous(read: VariableReader, *, required: bool) -> tuple[str | None, int | None]:
    """Return the same address and port in every task, unless MASTER_ADDR or MASTER_PORT are set."""
    if not required:
        return _rendezvous(read, required=False)
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


_PER_CORE = 16
_ANYWHERE = 256  # processes that mostly wait may be many more than cores


def check_process_count(option: str, count: int) -> None:
    """Raise an error for more processes than a host of this size can run, before the first is started.

    A number with a digit too many would block the whole machine for all its users.

    Raises:
        ConfigError: There are more than 16 for each core, and more than 256.
    """
    cores = available_cores()
    limit = max(_ANYWHERE, _PER_CORE * cores)
    if count > limit:
        msg = (
            f"{option} asks for {count} processes on this host of {cores} core{'s' * (cores > 1)}; at "
            f"most {limit} are started here"
        )
        raise ConfigError(msg)
