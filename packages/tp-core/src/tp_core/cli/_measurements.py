"""How fast ranks, devices and the disk are here, what of it is slow, and whether the ranks can meet."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_core._launch._environment import LaunchEnvironment
from tp_core._launch._process_group import join_process_group
from tp_core._launch._ranks import free_port
from tp_core.errors import RankFailedError, TpError

# -- Whether ranks can meet, how fast they exchange, and whether the clocks of their hosts agree
# ``python -m tp_core.cli._measurements`` is one of the ranks that ``tp doctor`` starts if it is none itself.


_NBYTES = 16 * 2**20
_REPEATS = 3  # of which the fastest counts: others may be busy


def meet(environment: LaunchEnvironment, *, timeout_s: float) -> dict[str, Any]:
    """Meet the other ranks and measure; called on every rank.

    Returns:
        On rank 0 "ranks", "hosts", "meeting_s", "all_reduce_s" of one number, "all_reduce_bytes_per_s" by
        kind of device, and "clocks" by host, each with its skew and how sure that is; the others know less.

    Collective: joining, a few all-reduces, one all-gather, messages between rank 0 and the first rank of
    each other host.
    """
    began = time.perf_counter()
    accelerator = _accelerator(environment)
    leave = join_process_group(environment, timeout_s=timeout_s)
    try:
        dist.all_reduce(torch.zeros(1))
        meeting_s = time.perf_counter() - began
        devices = [torch.device("cpu"), *([] if accelerator is None else [accelerator])]
        hosts: list[Any] = [None] * environment.world_size
        dist.all_gather_object(hosts, (environment.host_rank, socket.gethostname()))
        return {
            "ranks": environment.world_size,
            "hosts": len({number for number, _ in hosts}),
            "meeting_s": meeting_s,
            "all_reduce_s": _seconds(torch.zeros(1)),
            "all_reduce_bytes_per_s": {
                device.type: _NBYTES / _seconds(torch.zeros(_NBYTES // 4, device=device))
                for device in devices
            },
            "clocks": _skews(environment.rank, hosts),
        }
    finally:
        leave()


def _accelerator(environment: LaunchEnvironment) -> torch.device | None:
    """Return this rank's accelerator, where each rank of the host has one, and make it the current one."""
    if (
        not torch.accelerator.is_available()
        or torch.accelerator.device_count() < environment.local_world_size
    ):
        return None
    torch.accelerator.set_device_index(environment.local_rank)
    kind = torch.accelerator.current_accelerator()
    return None if kind is None or kind.type == "mps" else torch.device(kind.type, environment.local_rank)


def _seconds(tensor: torch.Tensor) -> float:
    """Return how long an all-reduce of a tensor takes."""
    found = []
    for _ in range(1 + _REPEATS):  # the first one makes connections
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _skews(rank: int, hosts: list[tuple[int, str]]) -> dict[str, dict[str, float]]:
    """Return by how much the clock of each other host is before rank 0's, and how sure that is.

    Cristian's algorithm (1989): the other clock is read between two looks at this one.
    """
    firsts = {number: hosts.index((number, name)) for number, name in hosts}
    found = {}
    for number, other in sorted(firsts.items()):
        if number == hosts[0][0]:
            continue
        readings = []
        for _ in range(5):
            now = torch.zeros(1, dtype=torch.float64)
            if rank == 0:
                sent = time.time()
                dist.send(now, other)
                dist.recv(now, other)
                received = time.time()
                readings.append(((received - sent) / 2, now.item() - (sent + received) / 2))
            elif rank == other:
                dist.recv(now, 0)
                dist.send(now.fill_(time.time()), 0)
        if readings:
            uncertainty, skew = min(readings)
            found[f"{hosts[other][1]} (host {number})"] = {"skew_s": skew, "uncertainty_s": uncertainty}
    return found


def start_ranks(count: int, *, timeout_s: float) -> dict[str, Any]:
    """Start ranks on this host that meet over its loopback, and return what they have measured."""
    with tempfile.TemporaryDirectory(prefix="tp-doctor-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        common = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "tp_core.cli._measurements",
            str(timeout_s),
            str(folder / "found.json"),
        ]
        processes = []
        for rank in range(count):
            output = stack.enter_context((folder / f"{rank}.log").open("wb"))
            environ = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, folder, timeout_s)
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def _wait(processes: list["subprocess.Popen[bytes]"], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            if process.poll() is not None:
                del waiting[rank]
            if process.returncode:
                lines = (folder / f"{rank}.log").read_text(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
                msg = f"{len(processes)} ranks of this host cannot meet: rank {rank} failed: {last}"
                raise RankFailedError(msg)
        if waiting and time.monotonic() > deadline:
            late = ", ".join(map(str, waiting))
            msg = (
                f"{len(processes)} ranks of this host had not met after {timeout_s:g} s; waiting: rank "
                f"{late}; a firewall on the loopback, or a name of this host that leads nowhere, does that"
            )
            raise RankFailedError(msg)
        time.sleep(0.02)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def main() -> None:
    environment = LaunchEnvironment.read()
    found = meet(environment, timeout_s=float(sys.argv[1]))
    if environment.is_main:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()


# -- How fast ranks, devices and the disk are here, and what of it is slow ------------------------


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
    """Write a file onto the disk, and delete it."""
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
            "training continue, or give another folder"
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
