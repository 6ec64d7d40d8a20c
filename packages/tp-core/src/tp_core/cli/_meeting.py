"""Whether ranks can meet and add up a number: those of a launcher, or ones that ``tp doctor`` starts here."""

import time
from typing import Any

import torch
import torch.distributed as dist

from tp_core._launch._environment import LaunchEnvironment
from tp_core.device_types import has_process_groups
from tp_core.errors import RankFailedError
from tp_core.ranks import RankPool
from tp_core.sessions._process_group import join_process_group

_GRACE_S = 5.0
"""The time that ranks have after their own deadline to report what they waited for."""


def meet(timeout_s: float) -> dict[str, Any]:
    """Meet the other ranks of this launch, and add up a number; called on every rank.

    Returns:
        "ranks", "hosts", "devices" (the kinds of device that exchanged the number), and "seconds".

    Raises:
        RankFailedError: The ranks did not meet in time, or the sum is wrong.

    Collective: joining, and one all-reduce on each kind of device.
    """
    began = time.perf_counter()
    environment = LaunchEnvironment.read()
    devices = [torch.device("cpu"), *_accelerators(environment)]
    leave = join_process_group(environment, timeout_s=timeout_s)
    try:
        for device in devices:
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            if total.item() != environment.world_size:
                msg = (
                    f"an all-reduce of ones over {environment.world_size} ranks gave {total.item():g} on "
                    f"{device}"
                )
                raise RankFailedError(msg)
    finally:
        leave()
    return {
        "ranks": environment.world_size,
        "hosts": environment.hosts,
        "devices": [device.type for device in devices],
        "seconds": time.perf_counter() - began,
    }


def _accelerators(environment: LaunchEnvironment) -> list[torch.device]:
    """Return this rank's accelerator as the current one, where each rank of the host has one of its own."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not has_process_groups(kind.type):
        return []
    if torch.accelerator.device_count() < environment.local_world_size:
        return []
    torch.accelerator.set_device_index(environment.local_rank)
    return [torch.device(kind.type, environment.local_rank)]


def start_and_meet(ranks: int, *, timeout_s: float) -> dict[str, Any]:
    """Start ranks on this host that meet over its loopback, and return what :func:`meet` found.

    Raises:
        RankFailedError: They cannot meet; in one line, with the rank that says why.
    """
    try:
        with RankPool(ranks, timeout_s=timeout_s + _GRACE_S) as pool:
            meeting: dict[str, Any] = pool.run(meet, timeout_s)[0]
    except RankFailedError as error:
        how, *trace = str(error).splitlines()
        # The error's own line is the last traceback's first without an indentation; notes may follow it.
        # One that hangs has none.
        last = max((at for at, line in enumerate(trace) if line.startswith("Traceback ")), default=len(trace))
        last_line = next((f" {line}" for line in trace[last + 1 :] if not line.startswith(" ")), "")
        msg = (
            f"{ranks} ranks of this host cannot meet: {how}{last_line}; a firewall on the loopback, or a "
            "name of this host that leads nowhere, does that"
        )
        raise RankFailedError(msg) from error
    return meeting
