"""Costs of the loss over class shards, alone and with its head, beside DTensor and code by hand.

python -m tests.bench.shard.loss [alone | head]

Two gloo ranks with one thread each; variants take turns, medians are compared. Memory is the most
that a step holds beyond what it began with, as the process's resident size says, in multiples of
this rank's logits.
"""

import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tp_shard as ts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from tp_testing import run_ranks

from tests.bench._results import Results

Step = Callable[[], object]
parallel_cross_entropy = ts.nn.functional.parallel_cross_entropy
fused = ts.nn.functional.parallel_linear_cross_entropy


class ByHand(torch.autograd.Function):
    """The shortest code that is right, with one buffer, as Megatron-Core does it."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        maximum = z.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        z = z - maximum.unsqueeze(1)
        local = target - dist.get_rank() * z.size(1)
        mine = (local >= 0) & (local < z.size(1))
        index = torch.where(mine, local, 0)
        found = torch.where(mine, z.gather(1, index.unsqueeze(1)).squeeze(1), 0)
        dist.all_reduce(found)
        total = z.exp_().sum(-1)
        dist.all_reduce(total)
        z.div_(total.unsqueeze(1))
        ctx.save_for_backward(z, index, mine)
        return (total.log() - found).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        z, index, mine = ctx.saved_tensors
        z.scatter_add_(1, index.unsqueeze(1), -mine.to(z.dtype).unsqueeze(1))
        return z.mul_(grad / z.size(0)), None


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak(step: Step) -> int:
    """Return the bytes by which the process grew at most during a step."""
    highest, running = 0, True
    before = resident()

    def watch() -> None:
        nonlocal highest
        while running:
            highest = max(highest, resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    running = False
    watcher.join()
    return highest - before


def measure(variants: dict[str, tuple[Step, Step]], rounds: int) -> dict[str, tuple[float, int]]:
    """Return each variant's median seconds and its memory. A variant prepares, then steps."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    grown = {}
    for name, (prepare, step) in variants.items():
        for _ in range(2):
            prepare()
            grown[name] = peak(step)
    for _ in range(rounds):
        for name, (prepare, step) in variants.items():
            prepare()
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(t), grown[name]) for name, t in times.items()}


def alone(rows: int, classes: int) -> dict[str, tuple[float, int]]:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    source = torch.randn(rows, classes // 2)
    target = torch.randint(0, classes, (rows,))
    leaf = source.clone().requires_grad_()

    def prepare() -> None:  # the last step's logits may have been overwritten, and its gradient kept
        leaf.grad = None
        leaf.data.copy_(source)

    def ours(inplace: bool) -> Step:
        def step() -> None:
            parallel_cross_entropy(
                leaf, target, num_classes=classes, parallel=True, inplace=inplace
            ).backward()

        return step

    def dtensor() -> None:
        z = DTensor.from_local(leaf, mesh, [Shard(1)], run_check=False)
        t = DTensor.from_local(target, mesh, [Replicate()], run_check=False)
        with loss_parallel():
            F.cross_entropy(z, t).backward()

    return measure(
        {
            "by hand, one buffer": (prepare, lambda: ByHand.apply(leaf, target).backward()),
            "tp_shard": (prepare, ours(False)),
            "tp_shard, in place": (prepare, ours(True)),
            "DTensor loss_parallel": (prepare, dtensor),
        },
        rounds=7,
    )


def head(rows: int, classes: int) -> dict[str, tuple[float, int]]:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(rows, 512, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    weight = torch.nn.Parameter(torch.randn(classes // 2, 512) * 0.02)

    def prepare() -> None:
        x.grad = weight.grad = None

    def apart(inplace: bool) -> Step:
        def step() -> None:
            logits = ts.nn.functional.parallel_linear(x, weight, None, -1, out_features=classes)
            parallel_cross_entropy(logits, target, inplace=inplace).backward()

        return step

    def dtensor() -> None:
        a = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        w = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        t = DTensor.from_local(target, mesh, [Replicate()], run_check=False)
        with loss_parallel():
            F.cross_entropy(F.linear(a, w), t).backward()

    def by_hand() -> None:
        ByHand.apply(ts.nn.functional.parallel_linear(x, weight, None, -1), target).backward()

    return measure(
        {
            "by hand, one buffer": (prepare, by_hand),
            "tp_shard": (prepare, apart(False)),
            "tp_shard, in place": (prepare, apart(True)),
            "tp_shard, fused": (prepare, lambda: fused(x, weight, target, num_classes=classes).backward()),
            "DTensor": (prepare, dtensor),
        },
        rounds=5 if classes < 500_000 else 3,
    )


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["alone", "head"]
    jobs = [(alone, 64, 1_000_000), (alone, 1024, 50_000), (head, 64, 100_000), (head, 1024, 100_000)]
    for function, rows, classes in [*jobs, (head, 64, 1_000_000)]:
        if function.__name__ in wanted:
            found = run_ranks(function, 2, rows, classes, timeout_s=110)[0]
            base, logits = found["by hand, one buffer"][0], rows * classes // 2 * 4
            with Results(f"shard-loss-{function.__name__}-{rows}-{classes}") as results:
                for name, (seconds, grown) in found.items():
                    results.add(f"{name}: time", seconds * 1e3, "ms")
                    results.add(f"{name}: time, ratio", seconds / base, "x by hand")
                    results.add(f"{name}: memory", grown / logits, "x logits")
