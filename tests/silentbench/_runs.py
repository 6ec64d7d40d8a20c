"""The programs' own runs: a loop of torch on one device, and the programs' lines on ranks; no verifier.

All compute in float64, so that what differs is the fault.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.compare import joined_parts, relative_error
from tp_core.random import seed_torch
from tp_core.ranks import RankPool
from tp_core.tensors import is_dtensor
from tp_verify import Strategy

from tests.silentbench._programs import Program

STEPS = 100


@dataclass
class Curve:
    """A run: the loss of each step, and the weights and buffers at its end."""

    losses: list[float]
    state: dict[str, Tensor]


def curve_of_one_device(program: Program, steps: int = STEPS) -> Curve:
    """Train on one device."""
    case = program.case(right=True)
    model = built(case)
    seed_torch(0)
    optimizer = make_optimizer(case, model)
    losses = []
    for number in range(steps):
        output = case["step"](model, _batch(program, number, right=True))
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss.backward()
        if "max_norm" in case:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Curve(losses, dict(_state(model)))


def curve_of_ranks(
    program: Program, pool: RankPool, *, right: bool, steps: int = STEPS, resumed: bool = False
) -> Curve:
    """Train on ranks, as the program does; ``resumed`` from a checkpoint of half of the steps."""
    with tempfile.TemporaryDirectory(prefix="silentbench-") as folder:
        curves = pool.run(_train, program, right, steps, folder if resumed else "")
    like = dict(_state(built(program.case(right=True))))
    state = joined_parts(like, [curve.state for curve in curves])
    losses = []
    for of_ranks in zip(*(curve.losses for curve in curves), strict=True):
        known = torch.tensor(of_ranks)
        losses.append(float(known[~known.isnan()].mean()))
    return Curve(losses, state)


def apart(one: Curve, other: Curve) -> float:
    """Return the largest difference of a weight or buffer of two runs, as a share of its norm."""
    return max(relative_error(tensor, other.state[name]) for name, tensor in one.state.items())


def looks_apart(
    one: Sequence[float], other: Sequence[float], *, share: float = 0.01, window: int = 10
) -> bool:
    """Return whether two curves, smoothed over some steps, are anywhere farther apart than a share."""
    pairs = zip(_smooth(one, window), _smooth(other, window), strict=True)
    return any(not abs(b - a) <= share * abs(a) for a, b in pairs)


def _smooth(losses: Sequence[float], window: int) -> list[float]:
    return [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def built(case: Mapping[str, Any], dtype: torch.dtype | None = torch.float64) -> nn.Module:
    """Return the model of a program, in a type, or as the program makes it."""
    seed_torch(0)
    model: nn.Module = case["build"]()
    return model if dtype is None else model.to(dtype)


def make_optimizer(case: Mapping[str, Any], model: nn.Module) -> Optimizer:
    if "optimizer" in case:
        return case["optimizer"](model)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _batch(program: Program, number: int, *, right: bool) -> Any:
    if program.name == "labels_at_seams":  # its right form has other batches
        return program.module.batch(number, right)
    return _double(program.module.batch(number))


def _double(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _double(value) for key, value in batch.items()}
    return batch.double() if batch.is_floating_point() else batch


def numbers_of_ranks(program: Program, pool: RankPool, *, right: bool) -> list[list[float]]:
    """Return the first numbers that each rank draws after the program has seeded it."""
    return pool.run(_draw, program, right)


def _draw(program: Program, right: bool) -> list[float]:
    join()
    program.case(right=right)["parallel"].seed(0)
    return torch.rand(4).tolist()


def losses_of_seeds(program: Program, pool: RankPool, *, right: bool) -> list[float]:
    """Return the first rank's loss of the first batch, with dropout, for two seeds."""
    return pool.run(_losses, program, right)[0]


def _losses(program: Program, right: bool) -> list[float]:
    join()
    case = program.case(right=right)
    strategy: Strategy = case["parallel"]
    model, _ = _prepared(case)
    losses = []
    for seed in range(2):
        strategy.seed(seed)
        share = strategy.share(_batch(program, 0, right=right))
        losses.append(float(strategy.backward(model, case["step"], [share])))
    return losses


def masks_of_ranks(program: Program, pool: RankPool, *, right: bool, name: str) -> list[list[bool]]:
    """Return which elements of the first batch a dropout layer drops on each rank."""
    return pool.run(_drop, program, right, name)


def _drop(program: Program, right: bool, name: str) -> list[bool]:
    join()
    case = program.case(right=right)
    model, _ = _prepared(case)
    masks: list[bool] = []
    layer = model.get_submodule(name)
    layer.register_forward_hook(lambda module, inputs, y: masks.extend((y == 0).flatten().tolist()))
    case["parallel"].seed(0)
    model(case["parallel"].share(_batch(program, 0, right=right)))
    return masks


def _train(program: Program, right: bool, steps: int, folder: str) -> Curve:
    join()
    case = program.case(right=right)
    strategy: Strategy = case["parallel"]
    model, optimizer = _prepared(case)
    strategy.seed(0)
    losses = []
    for number in range(steps):
        if folder and number == steps // 2:
            strategy.save(model, optimizer, folder)
            model, optimizer = _prepared(case)
            strategy.load(model, optimizer, folder)
        share = strategy.share(_batch(program, number, right=right))
        weights: list[float] = []

        def step(module: nn.Module, part: Any, weights: list[float] = weights) -> Any:
            output = case["step"](module, part)
            weights.append(float(output["weight"]) if isinstance(output, Mapping) else _rows(part))
            return output

        loss = strategy.backward(model, step, micro_batches(share, case.get("micro", 1)))
        if "max_norm" in case:
            strategy.clip(model, case["max_norm"])
        strategy.update(model, optimizer)
        losses.append(_mean(loss, sum(weights)))
    state = {}
    for name, tensor in _state(model):
        plain = strategy.plain_name(name)
        if plain is not None:
            whole = strategy.whole(plain, tensor)
            state[plain] = whole.full_tensor() if is_dtensor(whole) else whole
    strategy.close()
    return Curve(losses, state)


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _prepared(case: Mapping[str, Any]) -> tuple[nn.Module, Optimizer]:
    model, optimizer = case["parallel"].prepare(built(case), lambda made: make_optimizer(case, made))
    model.train()
    return model, optimizer


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach().clone()


def _mean(loss: Tensor, weight: float) -> float:
    """Return the mean of the ranks' losses by their weights, as a loop logs it."""
    if not weight:
        return float(loss)
    pair = torch.tensor([float(loss) * weight, weight], dtype=torch.float64)
    dist.all_reduce(pair)
    return float(pair[0] / pair[1])


def _rows(part: Any) -> int:
    return len(next(iter(part.values())) if isinstance(part, Mapping) else part)


def micro_batches(share: Any, count: int) -> list[Any]:
    if count == 1:
        return [share]
    if isinstance(share, Mapping):
        parts = zip(*(value.tensor_split(count) for value in share.values()), strict=True)
        return [dict(zip(share, part, strict=True)) for part in parts]
    return list(share.tensor_split(count))


def is_same(share: Any, batch: Any) -> bool:
    """Return whether a rank's share is the whole batch."""
    if isinstance(batch, Mapping):
        return all(is_same(share[key], value) for key, value in batch.items())
    return torch.equal(share, batch)
