"""How fast ranks, devices and the disk are here, and what of it is slow."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tp_core._launch._environment import LaunchEnvironment
from tp_core.cli._meeting import meet, start_ranks
from tp_core.errors import TpError

__all__ = ["lines_of", "measure", "slow_parts"]

_DISK_NBYTES, _COPY_NBYTES = 64 * 2**20, 64 * 2**20
_GB = 1e9

# Below, or above, these something holds training up; each with its reason in slow_parts().
SLOW_MEETING_S = 10.0
SLOW_LOOPBACK = 0.1 * _GB
SLOW_NETWORK = 1.0 * _GB
SLOW_ACCELERATORS = 5.0 * _GB
SLOW_DISK = 0.1 * _GB
SLOW_COPY = 4.0 * _GB
SLOW_CLOCK_S = 0.5


def measure(
    environment: LaunchEnvironment, *, ranks: int, folder: Path, timeout_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Measure what training waits for, and return it with what went wrong.

    Args:
        environment: What launched this process. Under a launcher all its ranks call this, and measure
            together; otherwise ``ranks`` are started.
        ranks: How many to start.
        folder: Where checkpoints would go.
        timeout_s: How long ranks may take to meet and measure.
    """
    found: dict[str, Any] = {"ranks": None, "copies": [], "disk": None}
    problems = []
    try:
        if environment.is_distributed:
            found["ranks"] = meet(environment, timeout_s=timeout_s)
        else:
            found["ranks"] = start_ranks(ranks, timeout_s=timeout_s)
    except (TpError, RuntimeError) as error:  # of torch.distributed
        problems.append(str(error))
    if environment.is_main:
        found["copies"] = list(_copies())
        try:
            found["disk"] = _disk(folder)
        except OSError as error:
            problems.append(f"nothing can be written where checkpoints would go: {error}")
    return found, problems


def _disk(folder: Path) -> dict[str, Any]:
    """Write a file onto the disk, and delete it.

    Raises:
        OSError: The folder is not there, or not to be written to, or the disk is full.
    """
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, prefix=".tp-doctor-") as file:
        began = time.perf_counter()
        for _ in range(_DISK_NBYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    return {"folder": str(folder.absolute()), "write_bytes_per_s": _DISK_NBYTES / seconds}


def _copies() -> Iterator[dict[str, Any]]:
    """Yield how fast tensors go from and to each accelerator, and from the first one to the others."""
    if not torch.accelerator.is_available():
        return
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return
    host = torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=kind.type != "mps")
    first: torch.Tensor | None = None
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind.type, index)
        there = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device)
        yield _copy(host, there, device)
        yield _copy(there, host, device)
        if first is None:
            first = there
        else:
            yield _copy(first, there, device)


def _copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> dict[str, Any]:
    found = []
    for _ in range(4):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    names = {"source": str(source.device), "target": str(target.device)}
    return names | {"bytes_per_s": source.numel() / min(found[1:])}


def slow_parts(found: dict[str, Any]) -> list[str]:
    """Return a sentence for each thing that is slow: how fast it is, from where on that is slow, and why."""
    said = []
    ranks, disk = found["ranks"], found["disk"]
    if ranks is not None:
        if ranks["meeting_s"] > SLOW_MEETING_S:
            said.append(
                f"ranks took {ranks['meeting_s']:.0f} s to meet (slow is more than {SLOW_MEETING_S:g} s): "
                "names of hosts may be looked up in vain; give MASTER_ADDR as a number"
            )
        for kind, speed in ranks["all_reduce_bytes_per_s"].items():
            limit, remedy = _limit_of(kind, ranks["hosts"])
            if speed < limit:
                said.append(
                    f"an all-reduce between {ranks['ranks']} ranks ({kind}) makes {_speed(speed)} (slow is "
                    f"less than {_speed(limit)}): the gradients of 100 million parameters take "
                    f"{4e8 / speed:.1f} s in each step; {remedy}"
                )
        for host, clock in ranks["clocks"].items():
            if abs(clock["skew_s"]) > SLOW_CLOCK_S + clock["uncertainty_s"]:
                said.append(
                    f"the clock of {host} is {clock['skew_s']:+.1f} s off (too much is {SLOW_CLOCK_S:g} s): "
                    "lines of several hosts' logs cannot be put in order; let the hosts ask one time server"
                )
    for copy in found["copies"]:
        if copy["bytes_per_s"] < SLOW_COPY:
            said.append(
                f"copies from {copy['source']} to {copy['target']} make {_speed(copy['bytes_per_s'])} (slow "
                f"is less than {_speed(SLOW_COPY)}, a third of what 16 lanes of PCIe 3.0 give): batches are "
                "waited for; another program may use the device, or it has few lanes"
            )
    if disk is not None and disk["write_bytes_per_s"] < SLOW_DISK:
        speed = disk["write_bytes_per_s"]
        said.append(
            f"the disk of {disk['folder']} takes {_speed(speed)} (slow is less than {_speed(SLOW_DISK)}): a "
            f"checkpoint of 10 GB takes {1e10 / speed / 60:.0f} minutes; Checkpoints(background=True) lets "
            "training go on, or give another folder"
        )
    return said


def _limit_of(kind: str, hosts: int) -> tuple[float, str]:
    """Return from where on an all-reduce is slow, and what helps."""
    if hosts > 1:
        return SLOW_NETWORK, "a faster network is chosen by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    if kind == "cpu":
        return SLOW_LOOPBACK, "other programs may keep the cores busy"
    return SLOW_ACCELERATORS, "the devices may exchange through the host: see nvidia-smi topo -m"


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield the measurements for people."""
    ranks, disk = found["ranks"], found["disk"]
    if ranks is not None:
        yield (
            f"{ranks['ranks']} ranks on {ranks['hosts']} host(s) met in {ranks['meeting_s']:.1f} s; an "
            f"all-reduce of one number takes {ranks['all_reduce_s'] * 1e3:.2f} ms"
        )
        for kind, speed in ranks["all_reduce_bytes_per_s"].items():
            yield f"all-reduce ({kind}): {_speed(speed)}"
        for host, clock in ranks["clocks"].items():
            yield f"clock of {host}: {clock['skew_s']:+.3f} s, to {clock['uncertainty_s']:.3f} s"
    for copy in found["copies"]:
        yield f"{copy['source']} -> {copy['target']}: {_speed(copy['bytes_per_s'])}"
    if disk is not None:
        yield f"disk of {disk['folder']}: {_speed(disk['write_bytes_per_s'])}, written and synchronized"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GB:.2f} GB/s"
