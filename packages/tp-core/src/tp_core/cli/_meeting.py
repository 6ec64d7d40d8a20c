"""Whether ranks can meet, how fast they exchange, and whether the clocks of their hosts agree.

``python -m tp_core.cli._meeting`` is one of the ranks that ``tp doctor`` starts if it is not one itself.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tp_core._launch._environment import LaunchEnvironment
from tp_core._launch._join import join_process_group
from tp_core.errors import RankFailedError

__all__ = ["meet", "start_ranks"]

_NBYTES = 16 * 2**20
_REPEATS = 3  # of which the fastest counts: others may be busy


def meet(environment: LaunchEnvironment, *, timeout_s: float) -> dict[str, Any]:
    """Meet the other ranks and measure; called on every rank.

    Returns:
        On rank 0 "ranks", "hosts", "meeting_s", "all_reduce_s" of one number, "all_reduce_bytes_per_s" by
        kind of device, and "clocks" by host, each with its skew and how sure that is; the others know less.

    Raises:
        RankFailedError: The others did not come in time.

    Collectives: joining, a few all-reduces, one all-gather, messages between rank 0 and the first rank of
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
    """Return by how much the clock of each other host is before that of rank 0's, and how sure that is.

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
    """Start ranks on this host that meet over its loopback, and return what they have measured.

    Raises:
        RankFailedError: The ranks did not meet before the deadline, or one failed; the message says which.
    """
    with tempfile.TemporaryDirectory(prefix="tp-doctor-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        common = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tp_core.cli._meeting", str(timeout_s), str(folder / "found.json")]
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
    """Wait until all ranks have ended.

    Raises:
        RankFailedError: A rank failed, or had not ended at the deadline.
    """
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Run as one of the ranks."""
    environment = LaunchEnvironment.read()
    found = meet(environment, timeout_s=float(sys.argv[1]))
    if environment.is_main:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
