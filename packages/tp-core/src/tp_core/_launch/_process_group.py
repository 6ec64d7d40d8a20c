"""The group of all processes of a job: the store in which they find each other, joining and leaving it."""

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not export them all
    HashStore,
    PrefixStore,
    ProcessGroup,
    Store,
)

from tp_core._launch._environment import LaunchEnvironment
from tp_core.errors import LaunchEnvironmentError, RankFailedError

# -- The key-value store through which the processes of one job find each other -------------------


EXITED_KEY = "tp-launch/left/{attempt}/{rank}"
"""What ``tp launch`` sets in its store when a process has ended with status 0 and others go on."""


def rendezvous_store(environment: LaunchEnvironment, *, timeout_s: float = 300.0) -> Store:
    """Return the store that all processes of the job share.

    Under torch's elastic launcher the agent serves it; otherwise rank 0 does, at the master
    address. There is one for each process: asking again returns the same. The agent's outlives a
    restart of the processes: what was written before one is not seen after it.

    Args:
        environment: What launched this process, with the master address and port.
        timeout_s: How many seconds to wait for the store to answer.

    Raises:
        LaunchEnvironmentError: The environment has no master address and port.
        RankFailedError: The store did not answer in time.
    """
    if environment.master_address is None or environment.master_port is None:
        msg = (
            f"{environment.world_size} processes need MASTER_ADDR and MASTER_PORT to find each "
            "other; start them with: tp launch -n N script.py"
        )
        raise LaunchEnvironmentError(msg)
    try:
        return _connect(
            environment.master_address,
            environment.master_port,
            environment.rank,
            environment.world_size,
            timeout_s,
        )
    except RuntimeError as error:
        msg = (
            f"rank {environment.rank} of {environment.world_size} could not reach the rendezvous "
            f"at {environment.master_address}:{environment.master_port} within {timeout_s:g} s: "
            f"{error}"
        )
        raise RankFailedError(msg) from error


def has_exited(store: Store, rank: int) -> bool:
    """Return whether ``tp launch`` has reported that the process of a rank ended with status 0.

    Args:
        store: What `rendezvous_store` returned, or a part of it.
        rank: Which one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return bool(store.check([EXITED_KEY.format(attempt=_attempt(), rank=rank)]))


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@functools.cache
def _connect(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Store:
    from torch.distributed.rendezvous import rendezvous

    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(
        rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timedelta(seconds=timeout_s))
    )
    return PrefixStore(f"tp/start/{_attempt()}", store)


# -- Joining torch's group of all processes of a job, leaving it, and making groups of some of them


_joined = count()


def join_process_group(
    environment: LaunchEnvironment,
    *,
    device: torch.device | None = None,
    backend: str = "",
    timeout_s: float = 600.0,
) -> Callable[[], None]:
    """Join torch's default process group, unless this process has done so; return what leaves it.

    A session calls it when it is opened and what it returns when it is closed. A process may join
    again after it has left: each time the ranks meet in a part of their own of the launcher's store,
    where plain ``torch.distributed.init_process_group`` would hang among the first one's
    keys. Where a script has joined already, nothing is joined, and leaving does nothing.

    Args:
        environment: What launched this process. One process without a launcher is a group of one.
        device: Where this process computes. An accelerator becomes the current device and chooses
            the communication backend; with ``None`` torch brings one for each kind of device.
        backend: torch's name of the communication backend; empty chooses by the device.
        timeout_s: How many seconds a collective waits for the other ranks.

    Returns:
        A function that leaves the group; calling it again does nothing.

    Raises:
        LaunchEnvironmentError: Several processes, and no address where they meet.
        RankFailedError: The other ranks did not come in time.

    Collectives: the ranks' rendezvous; every rank has to join, and every rank has to leave.

    Example:
        >>> leave = join_process_group(LaunchEnvironment.read({}), device=torch.device("cpu"))
        >>> torch.distributed.get_world_size()
        1
        >>> leave()
    """
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if dist.is_initialized():
        return _leave_nothing
    if not backend and device is not None:
        backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend or None,
        # A second group of this process must not meet the first one's keys.
        store=PrefixStore(f"tp/group/{next(_joined)}", _meeting_point(environment, timeout_s)),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device is not None and device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    _wait_until_connected(group)

    def leave() -> None:
        # Another one may have left for us, and joined again.
        if dist.is_initialized() and dist.group.WORLD is group:
            # A DDP module's reducer keeps the group alive. Where Python held a group last, torch gives
            # the interpreter's lock away while it joins gloo's threads; where the reducer did, it keeps
            # it. A thread that has yet to release a tensor of the last collective needs that lock: a
            # deadlock. Torch has no event for "released"; asleep, we let the thread finish.
            time.sleep(0.05)
            dist.destroy_process_group()

    return leave


def new_process_group(
    ranks: Sequence[int] | None = None, *, backend: str = "", known_to_all: bool = True
) -> ProcessGroup | None:
    """Make a group of some ranks that may be left at once.

    `torch.distributed.new_group` returns as soon as this rank has its connections; if it then destroys
    the group, the ranks that are still connecting fail with "Connection closed by peer". Here the members
    wait for each other.

    Args:
        ranks: The members, all ranks by default.
        backend: torch's name of the communication backend; by default that of the default group.
        known_to_all: Every rank calls this, members or not. Otherwise the members alone do.

    Returns:
        The group; ``None`` for a rank that is not a member.

    Collectives: forming the group, and one tiny all-reduce over the members.
    """
    group = dist.new_group(
        None if ranks is None else list(ranks),
        backend=backend or None,
        use_local_synchronization=not known_to_all,
    )
    if not isinstance(group, ProcessGroup):  # what torch has in place of a group for everybody else
        return None
    _wait_until_connected(group)
    return group


def _wait_until_connected(group: ProcessGroup | None) -> None:
    # NCCL connects at a group's first collective, so there is nothing to wait for.
    if dist.get_world_size(group) > 1 and "gloo" in dist.get_backend_config(group):
        dist.all_reduce(torch.zeros(1), group=group)


def _meeting_point(environment: LaunchEnvironment, timeout_s: float) -> Store:
    if environment.world_size == 1 and environment.master_address is None:
        return HashStore()
    return rendezvous_store(environment, timeout_s=timeout_s)


def _leave_nothing() -> None:
    """Do nothing: whoever joined the group leaves it."""
