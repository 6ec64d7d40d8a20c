"""A loss with margins over C class centers: a training step, all of it and with a sample of the centers.

python -m tests.bench.shard.margins [C ...]

Features of size 256, a batch of 64, ArcFace's margin, SGD with momentum: the step has the loss, its
gradients and the update. Two gloo ranks with one thread each; the unsharded loss runs on the first of
them while the other waits. Variants take turns, and a ratio is the median over the rounds. The code by
hand is that of InsightFace's Partial FC: centers are picked and normalized by autograd, and the softmax's
maximum and sum are exchanged. "peak" is what a rank has at most during a step: its centers, their momentum,
and what the step makes. "CPU" is the first rank's own time, which other programs disturb less.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tp_shard as ts
from torch import Tensor, nn
from torch.nn import functional as F
from tp_testing import run_ranks

from tests.bench._results import Results

FEATURES, BATCH, RATE = 256, 64, 0.1
SCALE, MARGIN = 64.0, 0.5
BASE = "unsharded, all centers"
Loss = Callable[[Tensor, Tensor], Tensor]


class SumGradient(torch.autograd.Function):
    """Forward: nothing. Backward: an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class SplitSoftmax(torch.autograd.Function):
    """Cross entropy of split logits, in their own buffer. Forward: three all-reduces. Backward: none."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, mine: Tensor) -> Tensor:
        maximum = logits.amax(1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        logits.sub_(maximum).exp_()
        total = logits.sum(1, keepdim=True)
        dist.all_reduce(total)
        logits.div_(total)
        found = torch.where(mine, logits.gather(1, index).squeeze(1), 0)
        dist.all_reduce(found)
        ctx.save_for_backward(logits, index, mine)
        return -found.clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, index, mine = ctx.saved_tensors
        logits.scatter_add_(1, index, -mine.to(logits.dtype).unsqueeze(1))
        return logits.mul_(grad / logits.size(0)), None, None


def with_margin(cosine: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    cosine[rows, index] = (cosine[rows, index].clamp(-1, 1).acos() + MARGIN).cos()
    return cosine * SCALE


def by_hand(weight: Tensor, classes: int, rate: float) -> Loss:
    local = weight.size(0)
    start = dist.get_rank() * local

    def loss(x: Tensor, target: Tensor) -> Tensor:
        mine = (target >= start) & (target < start + local)
        index = torch.where(mine, target - start, 0)
        centers = weight
        if rate < 1:
            drawn = torch.rand(local)
            drawn[index[mine]] = 2.0
            sampled = drawn.topk(int(rate * local)).indices.sort().values
            index = torch.where(mine, torch.searchsorted(sampled, index), 0)
            centers = weight[sampled]
        cosine = F.linear(SumGradient.apply(F.normalize(x)), F.normalize(centers))
        logits = with_margin(cosine, mine.nonzero().squeeze(1), index[mine])
        return SplitSoftmax.apply(logits, index.unsqueeze(1), mine)

    return loss


def unsharded(weight: Tensor) -> Loss:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(weight))
        return F.cross_entropy(with_margin(cosine, torch.arange(x.size(0)), target), target)

    return loss


def status(field: str) -> float:
    """Return a figure of this process's memory in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Variant:
    """How a step is taken, by which ranks, and what was measured on this one."""

    def __init__(self, loss: Loss, optimizer: torch.optim.Optimizer | None, weight: nn.Parameter) -> None:
        self.loss, self.optimizer, self.weight = loss, optimizer, weight
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.peak = 0.0

    def step(self, x: Tensor, target: Tensor) -> None:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        held = status("VmRSS")
        began, cpu = time.perf_counter(), time.thread_time()
        if self.optimizer is not None:
            self.loss(x, target).backward()
            self.optimizer.step()
        self.cpu.append(time.thread_time() - cpu)
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)
        kept = 2 * self.weight.nbytes / 2**20
        self.peak = max(self.peak, kept + status("VmHWM") - held)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            x.grad = None


def run(classes: int, rounds: int) -> dict[str, tuple[list[float], list[float], float]]:
    """Return for each variant the seconds of its steps, the first rank's CPU seconds, and the peak in MiB."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"m2": MARGIN, "scale": SCALE}
    every = ts.nn.MarginCrossEntropy(FEATURES, classes, **options)
    sampled = ts.nn.MarginCrossEntropy(FEATURES, classes, sample_rate=RATE, device="meta", **options)
    sparse = ts.nn.MarginCrossEntropy(
        FEATURES, classes, sample_rate=RATE, sparse=True, device="meta", **options
    )
    weight = sampled.weight = sparse.weight = (
        every.weight
    )  # steps of all split variants go on with one another's
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    ts.update_sampled_rows(optimizer)
    is_first = dist.get_rank() == 0
    whole = nn.Parameter(torch.randn(classes if is_first else 1, FEATURES) * 0.01)
    variants = {
        BASE: Variant(
            unsharded(whole), torch.optim.SGD([whole], lr=0.1, momentum=0.9) if is_first else None, whole
        ),
        "by hand, all centers": Variant(by_hand(weight, classes, 1.0), optimizer, weight),
        "tp_shard, all centers": Variant(every, optimizer, weight),
        "by hand, sample_rate=0.1": Variant(by_hand(weight, classes, RATE), optimizer, weight),
        "tp_shard, sample_rate=0.1": Variant(sampled, optimizer, weight),
        "tp_shard, sample_rate=0.1, sparse": Variant(sparse, optimizer, weight),
    }
    data = torch.Generator().manual_seed(1)  # all ranks have the same rows
    for _ in range(rounds + 1):  # the first makes the optimizers' state
        x = torch.randn(BATCH, FEATURES, generator=data).requires_grad_()
        target = torch.randint(classes, (BATCH,), generator=data)
        for variant in variants.values():
            variant.step(x, target)
    return {name: (v.seconds[1:], v.cpu[1:], v.peak) for name, v in variants.items()}


def ratio(values: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def main() -> None:
    for classes in [int(a) for a in sys.argv[1:]] or [100_000, 1_000_000]:
        rounds = 9 if classes <= 200_000 else 3
        found = run_ranks(run, 2, classes, rounds, timeout_s=500)[0]
        base_seconds, base_cpu, base_peak = found[BASE]
        with Results(f"shard-margins-{classes}") as results:
            for name, (seconds, cpu, peak) in found.items():
                results.add(f"{name}: step", statistics.median(seconds) * 1e3, "ms")
                results.add(f"{name}: step, ratio", ratio(seconds, base_seconds), "x unsharded")
                results.add(f"{name}: CPU, ratio", ratio(cpu, base_cpu), "x unsharded")
                results.add(f"{name}: peak", peak, "MiB per rank")
                results.add(f"{name}: peak, ratio", peak / base_peak, "x unsharded")
            for name in found:
                if name.startswith("tp_shard"):
                    kind = "all centers" if "all" in name else "sample_rate=0.1"
                    hand_seconds, hand_cpu, hand_peak = found[f"by hand, {kind}"]
                    seconds, cpu, peak = found[name]
                    results.add(f"{name}: step, to by hand", ratio(seconds, hand_seconds), "x by hand")
                    results.add(f"{name}: CPU, to by hand", ratio(cpu, hand_cpu), "x by hand")
                    results.add(f"{name}: peak, to by hand", peak / hand_peak, "x by hand")


if __name__ == "__main__":
    main()
