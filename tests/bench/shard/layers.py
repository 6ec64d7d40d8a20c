"""Costs of parallel layers beside torchshard, DTensor and the shortest code by hand.

python -m tests.bench.shard.layers

Two gloo ranks with one thread each. Variants take turns, medians are compared: trust the ratios.
torchshard takes part where it can be imported.
"""

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from tp_testing import run_ranks

from tests.bench._results import Results

Variants = dict[str, Callable[[], object]]


def medians(variants: Variants, *, rounds: int, calls: int) -> dict[str, float]:
    """Return the median seconds of one call of each variant; ranks begin each turn together."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in variants.values():
        for _ in range(3):
            variant()
    for _ in range(rounds):
        for name, variant in variants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(t) for name, t in times.items()}


class Copy(torch.autograd.Function):
    """The shortest code that is right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """The same for a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def step(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    """A forward and a backward pass; the output's gradient is all ones."""
    ones = None

    def run() -> None:
        nonlocal ones
        y = function(x)
        if ones is None:
            ones = torch.ones_like(y)
        y.backward(ones)

    return run


def peer() -> Any:
    """torchshard, with groups of the same ranks; ``None`` where it is not installed."""
    if importlib.util.find_spec("torchshard") is None:
        return None
    import torchshard

    torchshard.distributed.init_process_group(dist.get_world_size())
    return torchshard


class Mlp(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def dispatch() -> dict[str, dict[str, float]]:
    """Tiny layers whose collectives do nothing: what is left is the cost of the code around them."""
    start_ranks()
    n, real = dist.get_world_size(), dist.all_reduce
    torchshard = peer()
    mesh = init_device_mesh("cpu", (n,))

    class Done:
        def wait(self) -> None:
            pass

    def nothing(tensor: torch.Tensor, *_: object, async_op: bool = False, **__: object) -> object:
        return Done() if async_op else None

    found = {}
    for name, dim in [("column", 1), ("row", 0)]:
        x = torch.randn(8, 32 if dim else 32 // n, requires_grad=True)
        layer = ts.nn.ParallelLinear(32, 32, dim=dim)
        weight, bias = layer.weight, layer.bias
        assert bias is not None

        def by_hand(
            t: torch.Tensor, dim: int = dim, w: torch.Tensor = weight, b: torch.Tensor = bias
        ) -> torch.Tensor:
            return F.linear(Copy.apply(t), w, b) if dim else Reduce.apply(F.linear(t, w)) + b

        variants: Variants = {
            "F.linear": step(lambda t, w=weight, b=bias: F.linear(t, w, b), x),
            "nn.Linear": step(plain_linear(weight, bias), x),
            "by hand": step(by_hand, x),
            "tp_shard functional": step(
                lambda t, w=weight, b=bias, dim=dim: ts.nn.functional.parallel_linear(t, w, b, dim), x
            ),
            "tp_shard": step(layer, x),
        }
        if torchshard is not None:
            theirs = torchshard.nn.ParallelLinear(32, 32, dim=dim)
            marked = x.detach().requires_grad_()
            if not dim:
                torchshard.register_parallel_dim(marked, -1)
            variants["torchshard"] = step(theirs, marked)
        style = ColwiseParallel() if dim else RowwiseParallel()
        dtensor = parallelize_module(nn.Linear(32, 32), mesh, style)
        variants["DTensor (with its collectives)"] = step(dtensor, x)
        dist.all_reduce = nothing
        try:
            found[name] = medians(variants, rounds=31, calls=50)
        finally:
            dist.all_reduce = real
    return found


def plain_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.size(1), weight.size(0))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def mlp() -> dict[str, dict[str, float]]:
    """An MLP block 1024-4096-1024 on 256 rows, its collectives included."""
    start_ranks()
    n = dist.get_world_size()
    torchshard = peer()
    mesh = init_device_mesh("cpu", (n,))
    x = torch.randn(256, 1024, requires_grad=True)
    ours = Mlp(ts.nn.ParallelLinear(1024, 4096, dim=1), ts.nn.ParallelLinear(4096, 1024, dim=0))
    w1, b1, w2, b2 = ours.up.weight, ours.up.bias, ours.down.weight, ours.down.bias
    plain = Mlp(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    dtensor = parallelize_module(
        Mlp(nn.Linear(1024, 4096), nn.Linear(4096, 1024)),
        mesh,
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
    )
    variants: Variants = {
        "by hand": step(
            lambda t: Reduce.apply(F.linear(F.gelu(F.linear(Copy.apply(t), w1, b1)), w2)) + b2, x
        ),
        "tp_shard": step(ours, x),
        "DTensor": step(dtensor, x),
        "unsharded, on each rank": step(plain, x),
    }
    if torchshard is not None:

        class Theirs(Mlp):
            def forward(self, t: torch.Tensor) -> torch.Tensor:
                h = F.gelu(self.up(t))
                torchshard.register_parallel_dim(h, -1)  # lost on the way
                return self.down(h)

        variants["torchshard"] = step(
            Theirs(
                torchshard.nn.ParallelLinear(1024, 4096, dim=1),
                torchshard.nn.ParallelLinear(4096, 1024, dim=0),
            ),
            x,
        )
    return {"MLP 1024-4096-1024": medians(variants, rounds=9, calls=2)}


def start_ranks() -> None:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    torch.manual_seed(0)


def show(results: Results, found: dict[str, dict[str, float]], base: str, target: dict[str, str]) -> None:
    for name, times in found.items():
        for variant, seconds in times.items():
            results.add(f"{name}, {variant}", seconds * 1e6, "us")
            note = target.get(name, "") if variant == "tp_shard" else ""
            results.add(f"{name}, {variant}: ratio", seconds / times[base], f"x {base}", note=note)


if __name__ == "__main__":
    with Results("shard-layers") as results:
        targets = {"column": "at most 1.3", "row": "at most 1.6"}
        show(results, run_ranks(dispatch, 2, timeout_s=100)[0], "F.linear", targets)
        show(
            results,
            run_ranks(mlp, 2, timeout_s=100)[0],
            "by hand",
            {"MLP 1024-4096-1024": "at most 1.00"},
        )
