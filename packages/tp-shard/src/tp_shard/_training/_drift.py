"""Whether the ranks of a copy have the same gradients of what they all hold."""

import functools
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import DisagreementError

from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._groups._random import get_state
from tp_shard._shards._dtensors import local
from tp_shard._shards._layer import ParallelLayer
from tp_shard._shards._marks import holds_shard

__all__ = ["check_gradients"]

_BLOCK = 1 << 20
_TOLERANCE = 1e-2  # far above what the order of additions changes, far below what a forgotten sum does
_ROUNDING = 1e-7  # of the largest gradient: what is nothing but rounding may differ


@torch.no_grad()
def check_gradients(model: nn.Module, *, group: GroupLike = None) -> None:
    """Make sure that ranks which hold a copy of a model together agree on its whole parameters' gradients.

    Call it after a backward pass, on every rank. Parameters that are not split are the same on all ranks
    of a group and stay so if their gradients are. They are not where such a parameter works on a rank's
    own features or heads and its gradient is not summed, or where the ranks read different samples; then
    each rank trains a model of its own. The backend ``shard`` calls it once, after the first backward
    pass, and in debug mode after each, as :func:`clip_grad_norm_` of a model does.

    Args:
        model: The model, which may be wrapped.
        group: The ranks of one copy; the current model-parallel group by default.

    Raises:
        DisagreementError: The gradients of a parameter differ; it is named, on every rank.

    Collectives: an all-gather of three numbers for each parameter that is not split, and where they differ
    one of the states of the random generators.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> check_gradients(model)
    """
    ranks = as_group(group)
    whole = _whole(model)
    if ranks.size == 1 or not whole:
        return
    mine = torch.stack([_described(p) for _, p in whole])  # (parameters, 3)
    everyones = _gather(mine, ranks)  # (ranks, parameters, 3)
    largest = everyones[:, :, 1].nan_to_num(0.0, 0.0, 0.0).max().item()
    for index, (name, _) in enumerate(whole):
        found = everyones[:, index].tolist()
        for rank, other in enumerate(found):
            if _same(found[0], other, largest):
                continue
            raise DisagreementError(_disagreement(name, rank, found[0], other, _draw_alike(ranks, mine)))


def _disagreement(name: str, rank: int, first: list[float], other: list[float], draw_alike: bool) -> str:
    words = [f"norm {norm:.6g}" if has else "none" for has, norm, _ in (first, other)]
    what = (
        f"ranks 0 and {rank} of a copy have different gradients of {name} ({words[0]} and {words[1]}), "
        "though all of them hold the whole of it, and would train apart. "
    )
    if not draw_alike:
        return what + (
            "Their random numbers differ, so that they drop different elements of what all hold: give the "
            "ranks of a copy one seed with torch.manual_seed(), and let no rank draw more than the others"
        )
    return what + (
        "Its module works on one rank's features or heads: give it ts.Replicated() in the plan, or "
        "ts.distributed.copy() in a model of your own. Or what all hold gets a dropout of each rank's own, "
        "such as ts.nn.ParallelDropout. Or the ranks of a copy read different samples. ts.verify() names the "
        "module if it is the plan"
    )


def _draw_alike(group: Group, near: Tensor) -> bool:
    """Return whether the default generators of the ranks are in the same state.

    Collectives: an all-gather of a number for each generator.
    """
    places = {torch.device("cpu"), near.device}
    found = [zlib.crc32(get_state(place, None).numpy().tobytes()) for place in sorted(places, key=str)]
    everyones = _gather(torch.tensor(found, dtype=torch.float64, device=near.device), group)
    return bool((everyones == everyones[0]).all())


def _whole(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List what is trained and not split; layers know it even where others made new parameters of theirs."""
    shards = {
        id(p)
        for module in model.modules()
        if isinstance(module, ParallelLayer)
        for name, p in module._parameters.items()
        if name in module.splits
    }
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [(name, p) for name, p in trained if id(p) not in shards and not holds_shard(p)]


def _described(parameter: Tensor) -> Tensor:
    """Return whether there is a gradient, its norm, and its product with fixed numbers."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros(3, dtype=torch.float64, device=parameter.device)
    grad = local(grad)  # of a sharding beside ours
    if grad.is_sparse:
        grad = grad.coalesce().values()
    values = torch.view_as_real(grad) if grad.is_complex() else grad
    described = torch.zeros(3, dtype=torch.float64, device=values.device)
    described[0] = 1
    for block in values.reshape(-1).split(_BLOCK):
        wide = block.double()
        described[1] += wide.square().sum()
        described[2] += wide.dot(_numbers(values.device)[: wide.numel()])
    described[1].sqrt_()
    return described


@functools.lru_cache(maxsize=4)
def _numbers(device: torch.device) -> Tensor:
    return torch.arange(_BLOCK, dtype=torch.float64, device=device).cos_()


def _same(first: list[float], other: list[float], largest: float) -> bool:
    if first[0] != other[0]:
        return False
    values = torch.tensor([first[1:], other[1:]], dtype=torch.float64)
    if not values.isfinite().all():
        return True  # what is not finite is found elsewhere
    allowed = _TOLERANCE * max(first[1], other[1]) + _ROUNDING * largest
    return bool((values[0] - values[1]).abs().max() <= allowed)


def _gather(mine: Tensor, group: Group) -> Tensor:
    everyones = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(everyones, mine, group=group.handle)
    return torch.stack(everyones)
