"""The process group of a job: its rendezvous store, and functions to join and leave the group."""

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
from tp_core.device_types import binds_process_groups, has_process_groups
from tp_core.errors import LaunchEnvironmentError, RankFailedError

# Names of torch 2.13, which deprecates the only ones that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# -- The rendezvous store -------------------------------------------------------------------------


EXITED_KEY = "tp-launch/left/{attempt}/{rank}"
"""The key that ``tp launch`` sets in its store when a process has ended with status 0 before others."""


def rendezvous_store(environment: LaunchEnvironment, *, timeout_s: float = 300.0) -> Store:
    """Return the store that all processes of the job share.

    Under torch's elastic launcher the agent serves it; otherwise rank 0 does, at the master
    address. A process has one: later calls return the same. The agent's store survives a restart of the
    processes, so each attempt has its own prefix and does not read keys of the one before.

    Raises:
        LaunchEnvironmentError: The environment has no master address and port.
        RankFailedError: The store did not answer in time.

    Collective: the ranks' rendezvous; without an elastic agent the others wait for rank 0.
    """
    if environment.master_address is None or environment.master_port is None:
        msg = (
            f"{environment.world_size} processes need MASTER_ADDR and MASTER_PORT to find each "
            "other; start them with: tp launch -n N script.py (pip install tp-launch)"
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
    """Return whether ``tp launch`` has reported that the process of a rank ended with status 0."""
    # The launcher writes its key without our prefixes.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return bool(store.check([EXITED_KEY.format(attempt=_attempt(), rank=rank)]))


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@functools.cache
def _connect(address: str, port: int, rank: int, world_size: int, timeout_s: float) -> Store:
    from torch.distributed.rendezvous import rendezvous

    # IPv6 in a URL
    if ":" in address:
        host = f"[{address}]"
    else:
        host = address
    store, _, _ = next(
        rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timedelta(seconds=timeout_s))
    )
    return PrefixStore(f"tp/start/{_attempt()}", store)


# -- Process groups -------------------------------------------------------------------------------


_joined = count()


def join_process_group(
    environment: LaunchEnvironment,
    *,
    device: torch.device | None = None,
    backend: str = "",
    timeout_s: float = 600.0,
    bind_device: bool = True,
) -> Callable[[], None]:
    """Join torch's default process group, unless this process has done so; return a function to leave it.

    A session joins when it is opened and leaves when it is closed. A process may join again after it has
    left: each time the ranks use a prefix of their own in the launcher's store. Plain
    ``torch.distributed.init_process_group`` would hang on the keys of the first group. Where a script has
    joined already, this function joins nothing, and leaving does nothing.

    Args:
        environment: The launch environment. One process without a launcher is a group of one.
        device: The device of this process. An accelerator becomes the current device and chooses
            the communication backend; with ``None`` the CPU has one, and the accelerator, if there is one.
        backend: torch's name of the communication backend; empty chooses by the device.
        timeout_s: The seconds that a collective waits for the other ranks.
        bind_device: Whether to bind a group of NCCL to the device, by torch's ``device_id``, so that it
            connects at once. It was seen to hang so (pytorch#153960).

    Returns:
        A function that leaves the group; calling it again does nothing.

    Raises:
        LaunchEnvironmentError: There are several processes, and no master address.
        RankFailedError: The other ranks did not join in time.

    Collective: the ranks' rendezvous; every rank must join, and every rank must leave.

    Example:
        >>> leave = join_process_group(LaunchEnvironment.read({}), device=torch.device("cpu"))
        >>> torch.distributed.get_world_size()
        1
        >>> leave()
    """
    if device is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if dist.is_initialized():
        return lambda: None  # the code that has joined leaves
    if not backend:
        backend = _backend_of(device)
    bound_to = None
    if bind_device and device is not None and binds_process_groups(device):
        bound_to = device
    dist.init_process_group(
        backend,
        # A prefix for each group: a second group of this process would hang on keys of the first.
        store=PrefixStore(f"tp/group/{next(_joined)}", _store_of_group(environment, timeout_s)),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=bound_to,
    )
    group = dist.group.WORLD
    _wait_until_connected(group)

    def leave() -> None:
        # The script may have destroyed the group, and joined another: that one is not ours to destroy.
        if dist.is_initialized() and dist.group.WORLD is group:
            # A DDP module's reducer keeps the group alive. Where Python held a group last, torch releases
            # the GIL while it joins gloo's threads; where the reducer did, torch keeps it. A thread that
            # has yet to release a tensor of the last collective needs the GIL: a deadlock. torch has no
            # event for "released"; this sleep lets the thread finish.
            time.sleep(0.05)
            dist.destroy_process_group()

    return leave


def _backend_of(device: torch.device | None) -> str:
    """Return torch's name of the communication backend for a device, or for all kinds that are here."""
    if device is not None:
        return dist.get_default_backend_for_device(device)
    of_cpu = dist.get_default_backend_for_device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not has_process_groups(accelerator.type):
        return of_cpu
    # Without a name torch 2.13 makes the accelerator's alone, and the ranks of a job on the CPU need gloo.
    kind = accelerator.type
    return f"cpu:{of_cpu},{kind}:{dist.get_default_backend_for_device(kind)}"


def new_process_group(
    ranks: Sequence[int] | None = None,
    *,
    backend: str = "",
    known_to_all: bool = True,
    timeout_s: float | None = None,
) -> ProcessGroup | None:
    """Return a group of some ranks, which a member may destroy at once.

    `torch.distributed.new_group` returns as soon as this rank has its connections. If it then destroys
    the group, ranks that are still connecting fail with "Connection closed by peer". So the members wait
    for each other here.

    Args:
        ranks: The members, all ranks by default.
        backend: torch's name of the communication backend; by default the default group's.
        known_to_all: Whether every rank calls this, members or not; otherwise the members alone do.
        timeout_s: The seconds that a collective waits for the other members; ``None`` for torch's own,
            which are not those of the default group.

    Returns:
        The group; ``None`` for a rank that is not a member.

    Collective: the creation of the group, and with gloo one tiny all-reduce over the members.
    """
    members = None if ranks is None else list(ranks)
    if timeout_s is None:
        timeout = None
    else:
        timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(
        members,
        timeout=timeout,
        backend=backend or None,
        use_local_synchronization=not known_to_all,
    )
    if not isinstance(group, ProcessGroup):  # torch returns a placeholder to ranks that are no members
        return None
    _wait_until_connected(group)
    return group


def _wait_until_connected(group: ProcessGroup | None) -> None:
    # For gloo only: NCCL connects at a group's first collective, so there is nothing to wait for.
    if dist.get_world_size(group) > 1 and "gloo" in dist.get_backend_config(group):
        dist.all_reduce(torch.zeros(1), group=group)


def _store_of_group(environment: LaunchEnvironment, timeout_s: float) -> Store:
    if environment.world_size == 1 and environment.master_address is None:
        return HashStore()
    return rendezvous_store(environment, timeout_s=timeout_s)
