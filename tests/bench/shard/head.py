"""A head 512 -> C on a batch of 64: step time and memory, split over two ranks and in one piece.

python -m tests.bench.shard.head [C ...]

Every variant runs in processes of its own, two gloo ranks with one thread each, the unsharded one
on a single rank. "building" and "stepping" are the peaks above what the process held before; "held"
is what the parameters keep. torchshard takes part where it can be imported.
"""

import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import tp_shard as ts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from tp_shard.nn.functional import parallel_cross_entropy
from tp_testing import run_ranks

from tests.bench._results import Results

FEATURES, BATCH = 512, 64
Head = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor, Tensor], None]]


def status(field: str) -> float:
    """Return a figure of this process's memory in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def heads(name: str, classes: int) -> Head:
    """Return how to build a variant's head, and how it takes a step."""
    if name == "unsharded":

        def step(head: nn.Module, x: Tensor, y: Tensor) -> None:
            F.cross_entropy(head(x), y).backward()

        return lambda: nn.Linear(FEATURES, classes), step
    if name == "tp_shard":

        def step(head: nn.Module, x: Tensor, y: Tensor) -> None:
            parallel_cross_entropy(head(x), y, num_classes=classes, inplace=True).backward()

        return lambda: ts.nn.ParallelLinear(FEATURES, classes, dim=-1), step
    if name == "DTensor":
        mesh = init_device_mesh("cpu", (2,))
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)

        def step(head: nn.Module, x: Tensor, y: Tensor) -> None:
            with loss_parallel():
                F.cross_entropy(head(x), y).backward()

        return lambda: parallelize_module(nn.Linear(FEATURES, classes), mesh, style), step
    import torchshard

    torchshard.distributed.init_process_group(2)

    def step(head: nn.Module, x: Tensor, y: Tensor) -> None:
        torchshard.nn.functional.parallel_cross_entropy(head(x), y).backward()

    return lambda: torchshard.nn.ParallelLinear(FEATURES, classes, dim=-1), step


def run(name: str, classes: int, steps: int) -> tuple[float, float, float, float]:
    """Return the median seconds of a step, and in MiB the peak of building, what is held, a step's peak."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    make, step = heads(name, classes)
    warm_up(name)
    before = forget_peak()
    head = make()
    building, kept = status("VmHWM") - before, status("VmRSS") - before
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    times = []
    forget_peak()
    for _ in range(steps + 1):
        x = torch.randn(BATCH, FEATURES, requires_grad=True)
        y = torch.randint(classes, (BATCH,))
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        step(head, x, y)
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]), building, kept, status("VmHWM") - before


def warm_up(name: str) -> None:
    """Take a tiny step: what is loaded only once is no head's memory."""
    F.cross_entropy(nn.Linear(4, 4)(torch.ones(1, 4)), torch.zeros(1, dtype=torch.long)).backward()
    if name != "unsharded":
        dist.all_reduce(torch.ones(1))


def main() -> None:
    names = ["unsharded", "tp_shard", "DTensor"]
    if importlib.util.find_spec("torchshard") is not None:
        names.append("torchshard")
    for classes in [int(a) for a in sys.argv[1:]] or [100_000, 1_000_000]:
        with Results(f"shard-head-{classes}") as results:
            base = 0.0
            for name in names:
                ranks = 1 if name == "unsharded" else 2
                steps = 10 if classes <= 200_000 else 3
                found = run_ranks(run, ranks, name, classes, steps, timeout_s=180)[0]
                seconds, *memory = found
                base = base or seconds
                results.add(f"{name}: step", seconds * 1e3, "ms")
                results.add(f"{name}: step, ratio", seconds / base, "x unsharded")
                for what, mib in zip(("building", "held", "stepping"), memory, strict=True):
                    results.add(f"{name}: {what}", mib, "MiB per rank")


if __name__ == "__main__":
    main()
