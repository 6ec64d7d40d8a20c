"""Attention heads over ranks: their distribution, and attention on the local heads."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._groups._collectives import all_reduce_, apply
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._groups._random import RandomTracker
from tp_shard._split import Ranges, Split, bounds

Holds = Literal["q", "kv", "qkv"]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, and the key and value heads that they share, over the ranks of a group.

    With at least as many key heads as ranks, a rank has some of them with all their query heads. With fewer,
    several ranks have the same key head, each with a part of its query heads.

    Attributes:
        kv: The number of key heads, and of value heads; it divides ``query``.
    """

    query: int
    kv: int
    ranks: int

    def __post_init__(self) -> None:
        if self.query < 1 or self.kv < 1 or self.query % self.kv:
            msg = f"{self.query} query heads cannot share {self.kv} key heads: the one divides the other"
            raise ConfigError(msg)
        if self.query < self.ranks or (self.kv < self.ranks and self.ranks % self.kv):
            msg = (
                f"{self.query} query heads and {self.kv} key heads cannot be divided over {self.ranks} "
                "ranks: take at most as many ranks as query heads, and a multiple of the key heads if "
                "more than those"
            )
            raise ConfigError(msg)

    def kv_bounds(self, rank: int) -> tuple[int, int]:
        """Return the first key head of ``rank``, and the one after its last."""
        if self.kv >= self.ranks:
            return bounds(self.kv, self.ranks, rank)
        head = rank * self.kv // self.ranks
        return head, head + 1

    def query_bounds(self, rank: int) -> tuple[int, int]:
        """Return the first query head of ``rank``, and the one after its last."""
        each = self.query // self.kv
        first, last = self.kv_bounds(rank)
        if self.kv >= self.ranks:
            return first * each, last * each
        holders = self.ranks // self.kv
        start, stop = bounds(each, holders, rank % holders)
        return first * each + start, first * each + stop

    def ranges(self, head_dim: int, holds: Holds) -> tuple[Ranges, ...]:
        """Return for each rank its features of a projection with heads of width ``head_dim``.

        ``holds`` is "q", "kv" (keys or values), or "qkv", all three one after another.
        """
        by_rank = []
        for rank in range(self.ranks):
            q = self.query_bounds(rank)
            kv = self.kv_bounds(rank)
            # For each section: where it begins, in heads, and which of its heads the rank has.
            if holds == "q":
                sections = [(0, q)]
            elif holds == "kv":
                sections = [(0, kv)]
            else:
                sections = [(0, q), (self.query, kv), (self.query + self.kv, kv)]
            ranges = [((at + a) * head_dim, (at + b) * head_dim) for at, (a, b) in sections]
            by_rank.append(tuple(ranges))
        return tuple(by_rank)


def section_ranges(size: int, sections: int, ranks: int) -> tuple[Ranges, ...]:
    """Return for each rank its features of ``sections`` equal sections one after another."""
    width, rest = divmod(size, sections)
    if rest:
        msg = f"{size} features are not {sections} sections of the same size"
        raise ConfigError(msg)
    by_rank = []
    for rank in range(ranks):
        a, b = bounds(width, ranks, rank)
        by_rank.append(tuple((i * width + a, i * width + b) for i in range(sections)))
    return tuple(by_rank)


def sum_shared(tensor: Tensor, split: Split, group: Group) -> Tensor:
    """Return a shard, with summed gradients for the pieces that other ranks hold too.

    Forward: nothing. Backward: an all-reduce of the shared pieces' gradients, if there are any.
    """
    if group.size == 1 or not _shared(split):
        return tensor
    return apply(_SumShared, tensor, split, group)


def _shared(split: Split) -> list[tuple[int, int]]:
    """Return the pieces of a dimension that several ranks hold."""
    pieces = [piece for ranges in split.ranges for piece in ranges]
    return sorted({piece for piece in pieces if pieces.count(piece) > 1 and piece[0] < piece[1]})


class _SumShared(torch.autograd.Function):
    # Forward: nothing. Backward: one all-reduce.
    # Ranks hold: sharded -> sharded; gradient: partial -> sharded.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, group: Group) -> Tensor:
        ctx.split = split
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        split = ctx.split
        group = ctx.group
        shared = _shared(split)
        shape = list(grad.shape)
        shape[split.dim] = sum(b - a for a, b in shared)
        # One tensor with a place for every shared piece, zero for those of other ranks: all ranks take part
        # in the same all-reduce, though none of them holds all pieces.
        total = grad.new_zeros(shape)
        places = {}
        at = 0
        for a, b in shared:
            places[a, b] = total.narrow(split.dim, at, b - a)
            at += b - a
        own_pieces = dict(_pieces(grad, split, group.rank))
        for piece, place in places.items():
            if piece in own_pieces:
                place.copy_(own_pieces[piece])
        all_reduce_(total, group, layer="key and value heads that ranks share")
        result = grad.clone()  # autograd may still hold the incoming gradient
        for piece, part in _pieces(result, split, group.rank):
            if piece in places:
                part.copy_(places[piece])
        return result, None, None


def _pieces(tensor: Tensor, split: Split, rank: int) -> list[tuple[tuple[int, int], Tensor]]:
    """Return the pieces of a rank's shard, each with its range in the whole tensor."""
    pieces = []
    at = 0
    for a, b in split.ranges[rank]:
        pieces.append(((a, b), tensor.narrow(split.dim, at, b - a)))
        at += b - a
    return pieces


def parallel_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    group: GroupLike = None,
) -> Tensor:
    """Compute scaled dot-product attention with this rank's heads.

    Heads are split as in Megatron-LM (arXiv:1909.08053). Query heads may share key heads (arXiv:2305.13245).

    Collectives: none; the row layer that follows joins the heads.

    Args:
        qkv: Queries, keys and values of this rank's heads one after another, of shape (..., seq, (local query
            heads + 2 x local key heads) x head features). A layer with the style
            ``Column(heads=heads, kv_heads=kv_heads, holds="qkv")`` makes them.
        heads: The number of query heads over all ranks.
        kv_heads: The number of key heads; as many as query heads by default.
        causal: Whether a position attends only to itself and earlier ones.
        dropout: The probability, from 0 to 1, with which a weight is dropped; each rank draws for its own
            heads.
        group: The ranks; the current model-parallel group by default.

    Returns:
        A tensor of shape (..., seq, local query heads x head features).

    Raises:
        ConfigError: The width does not fit this rank's heads, or the heads cannot be divided over the ranks.

    Example:
        >>> parallel_attention(torch.ones(2, 5, 3 * 8), heads=4, causal=True).shape  # on one rank
        torch.Size([2, 5, 8])
    """
    ranks = as_group(group)
    if kv_heads is None:
        kv_heads = heads
    divided = Heads(heads, kv_heads, ranks.size)
    q0, q1 = divided.query_bounds(ranks.rank)
    k0, k1 = divided.kv_bounds(ranks.rank)
    queries = q1 - q0
    keys = k1 - k0
    width, rest = divmod(qkv.size(-1), queries + 2 * keys)
    if rest:
        msg = (
            f"rank {ranks.rank} of {ranks.size} has {queries} query and {keys} key heads, which do not "
            f"divide {qkv.size(-1)} features; give the layer Column(heads={heads}, kv_heads={divided.kv}, "
            'holds="qkv")'
        )
        raise ConfigError(msg)
    # (..., seq, features) -> (..., heads, seq, head features)
    split = qkv.unflatten(-1, (queries + 2 * keys, width)).transpose(-2, -3)
    q, k, v = split.split([queries, keys, keys], dim=-3)
    if queries != keys:
        # Repeat each key and value head for the query heads of this rank that share it.
        each = divided.query // divided.kv
        owner = torch.arange(q0, q1, device=qkv.device) // each - k0
        k = k.index_select(-3, owner)
        v = v.index_select(-3, owner)
    random_numbers: AbstractContextManager[Any] = nullcontext()
    if dropout and ranks.size > 1:  # heads of different ranks drop different weights
        random_numbers = RandomTracker(0, group=ranks).fork(qkv.device)
    with random_numbers:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    return out.transpose(-2, -3).flatten(-2)  # (..., seq, local query heads x head features)
