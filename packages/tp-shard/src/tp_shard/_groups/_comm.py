"""Collectives on plain tensors, without gradients. Nothing here writes into what others hold."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._groups import _debug
from tp_shard._groups._group import Group

__all__ = ["all_gather", "all_gather_flat", "all_reduce_", "gather_sizes", "join", "start_all_reduce_"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def all_gather_flat(output: Tensor, mine: Tensor, group: Group) -> None:
    """Fill a contiguous ``output`` with the ranks' tensors, one after the other.

    Args:
        output: With ``group.size`` times the elements of ``mine``.
        mine: Contiguous, and of the same shape on all ranks.
        group: The ranks.

    Collectives: one all-gather.
    """
    # As flat as it can be: gloo wants the gathered tensor to have the dimensions of the single one.
    _all_gather(output.view(-1), mine.view(-1), group=group.handle)


def all_reduce_(tensor: Tensor, group: Group, *, layer: Any = None) -> Tensor:
    """Sum a contiguous tensor of ours over the ranks, in place, and return it.

    Collectives: one all-reduce.
    """
    if _debug.state.enabled:
        _debug.check("all_reduce", tensor, group, layer)
    dist.all_reduce(tensor, group=group.handle)
    return tensor


def start_all_reduce_(tensor: Tensor, group: Group, *, layer: Any = None) -> dist.Work:
    """Begin to sum a contiguous tensor of ours over the ranks, in place; wait for what is returned.

    Collectives: one all-reduce.
    """
    if _debug.state.enabled:
        _debug.check("all_reduce", tensor, group, layer)
    work: dist.Work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    return work


def gather_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """Return what ``size`` is on each rank.

    Collectives: one all-gather of a number.
    """
    mine = torch.tensor([size], device=device)
    if _debug.state.enabled:
        _debug.check("all_gather of sizes", mine, group, None)
    sizes = mine.new_empty(group.size)
    all_gather_flat(sizes, mine, group)
    return [int(n) for n in sizes.tolist()]


def all_gather(tensor: Tensor, dim: int, sizes: list[int], group: Group, *, layer: Any = None) -> Tensor:
    """Return the ranks' tensors joined along ``dim``; ``sizes`` are theirs in that dimension.

    Collectives: one all-gather; shorter shards are padded to the longest for the journey.

    Raises:
        ConfigError: ``tensor`` has another size than ``sizes`` says.
    """
    dim %= tensor.dim()
    if tensor.size(dim) != sizes[group.rank]:
        msg = (
            f"rank {group.rank} of {group.size} holds {tensor.size(dim)} of {sum(sizes)} in dim {dim}, "
            f"and its shard has {sizes[group.rank]}; the shards have sizes {sizes}"
        )
        raise ConfigError(msg)
    if _debug.state.enabled:
        _debug.check("all_gather", tensor, group, layer, uneven_dim=dim)
    longest = max(sizes)
    mine = tensor.detach().movedim(dim, 0)
    if mine.size(0) < longest:
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: mine.size(0)] = mine
        mine = padded
    mine = mine.contiguous()
    everyones = mine.new_empty((group.size, *mine.shape))
    all_gather_flat(everyones, mine, group)
    return join(list(everyones.unbind()), dim, sizes)


def join(parts: list[Tensor], dim: int, sizes: list[int]) -> Tensor:
    """Join gathered parts, whose cut dimension is the first and padded, along ``dim``."""
    trimmed = [part[:size].movedim(0, dim) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(trimmed, dim)
