"""The key-value store through which the processes of one job find each other."""

import functools
import os
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not export it

from tp_core._launch._environment import LaunchEnvironment
from tp_core.errors import LaunchEnvironmentError, RankFailedError

__all__ = ["LEFT_KEY", "has_left", "rendezvous_store"]

LEFT_KEY = "tp-launch/left/{attempt}/{rank}"
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


def has_left(store: Store, rank: int) -> bool:
    """Return whether ``tp launch`` has reported that the process of a rank ended with status 0.

    Args:
        store: What `rendezvous_store` returned, or a part of it.
        rank: Which one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return bool(store.check([LEFT_KEY.format(attempt=_attempt(), rank=rank)]))


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
