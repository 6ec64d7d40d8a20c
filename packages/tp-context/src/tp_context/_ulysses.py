"""Attention by heads: two all-to-alls change slices of the sequence for some of the heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tp_context._all_gather import AllGatherAttention
from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._dropout_mask import DropoutMask, padded
from tp_context._slices import Cut, resized, views


def ulysses(inputs: Inputs, rules: Rules, cuts: QueryKeyCuts) -> Tensor:
    """Attend with some heads to whole sequences, which are all here."""
    query, key, value, mask, bias, sinks = inputs
    rows, keys = cuts
    heads = query.size(-3)
    grouped = rules.grouped
    if grouped and key.size(-3) % keys.size:  # a group may lie on two ranks
        grouped = False
        shared = heads // key.size(-3)
        key = key.repeat_interleave(shared, -3)
        value = value.repeat_interleave(shared, -3)
    each = -(-heads // keys.size)
    mine = slice(min(keys.rank * each, heads), min((keys.rank + 1) * each, heads))
    if rules.dropout:
        noise = DropoutMask(inputs, rules, (mine, each))
    else:
        noise = None
    if rows is keys:
        query, key, value = _ToHeads.apply(keys, query, key, value)  # type: ignore[no-untyped-call]  # torch's
    else:
        (query,) = _ToHeads.apply(rows, query)  # type: ignore[no-untyped-call]  # as above
        key, value = _ToHeads.apply(keys, key, value)  # type: ignore[no-untyped-call]  # as above
    if mask is not None:
        mask = _rows_of_heads(mask, rows, mine, each)
    if bias is not None:
        bias = _rows_of_heads(bias, rows, mine, each)
    if sinks is not None:
        sinks = padded(sinks[mine], 0, each)
    own = Inputs(query, key, value, mask, bias, sinks)
    here = rules._replace(rows=None, keys=None, grouped=grouped)
    mixed = AllGatherAttention.apply(here, noise, *own)  # type: ignore[no-untyped-call]
    (back,) = _ToTokens.apply(rows, (heads,), mixed)  # type: ignore[no-untyped-call]
    return cast("Tensor", back)


_rows_of_masks: Any = WeakIdKeyDictionary()
"""All rows of a mask, by the mask of this rank's rows: layers share one."""


def _rows_of_heads(table: Tensor, rows: Cut, mine: slice, each: int) -> Tensor:
    """Return all rows of a mask or bias for this rank's heads.

    Collective: an all-to-all where heads differ, an all-gather where they do not.
    """
    has_heads = table.dim() > 2 and table.size(-3) > 1
    if table.size(-2) == 1:
        if not has_heads:
            return table
        return padded(table[..., mine, :, :], -3, each)
    if has_heads:
        (moved,) = _ToHeads.apply(rows, table)  # type: ignore[no-untyped-call]
        return cast("Tensor", moved)
    if table.requires_grad:
        return rows.gather(table, -2)
    if table not in _rows_of_masks:
        _rows_of_masks[table] = rows.all_gather(table, -2)
    whole: Tensor = _rows_of_masks[table]
    return whole


def _to_heads(tensors: Sequence[Tensor], cut: Cut) -> list[Tensor]:
    """Return whole sequences of some heads, from slices of all. Collective: an all-to-all.

    Ranks hold: sharded -> sharded.

    Heads that do not divide are padded with zeros at the end: all ranks have as many.
    """
    cut.announce(("to heads", [[*t.shape[:-2], *t.shape[-1:]] for t in tensors], str(tensors[0].dtype)))
    shapes = [resized(t.shape, -3, -(-t.size(-3) // cut.size)) for t in tensors]
    count = sum(shape.numel() for shape in shapes)
    dtype = tensors[0].dtype
    # gloo has no bool
    if dtype is torch.bool:
        sent_dtype = torch.uint8
    else:
        sent_dtype = dtype
    sent = tensors[0].new_zeros((cut.size, count), dtype=sent_dtype)
    for rank, flat in enumerate(sent):
        for tensor, place in zip(tensors, views(flat, shapes), strict=True):
            heads = _heads_of(tensor, rank, place.size(-3)).detach()
            place[..., : heads.size(-3), :, :].copy_(heads)
    counts = [count // cut.tokens * n for n in cut.counts]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent.view(-1), counts, [count] * cut.size, group=cut.group)
    del sent
    return [whole.to(dtype) for whole in cut.joined(received.split(counts), shapes, -2)]


def _to_tokens(wholes: Sequence[Tensor], cut: Cut, heads: Sequence[int]) -> list[Tensor]:
    """Return slices of all heads, from whole sequences of some. Collective: an all-to-all.

    Ranks hold: sharded -> sharded.
    """
    cut.announce(("to tokens", [[*t.shape[:-2], *t.shape[-1:]] for t in wholes], str(wholes[0].dtype)))
    shapes = [resized(w.shape, -2, cut.tokens) for w in wholes]
    count = sum(shape.numel() for shape in shapes)
    sent = cut.divided(wholes, -2)
    received = sent.new_empty((cut.size, count))
    counts = [count // cut.tokens * n for n in cut.counts]
    dist.all_to_all_single(received.view(-1), sent, [count] * cut.size, counts, group=cut.group)
    del sent
    slices = [received.new_empty(resized(s, -3, n)) for s, n in zip(shapes, heads, strict=True)]
    for rank, flat in enumerate(received):
        for tensor, part in zip(slices, views(flat, shapes), strict=True):
            place = _heads_of(tensor, rank, part.size(-3))
            place.copy_(part[..., : place.size(-3), :, :])
    return slices


def _heads_of(tensor: Tensor, rank: int, each: int) -> Tensor:
    """Return a view of the heads of a rank, of which there may be fewer than ``each``, or none."""
    return tensor[..., rank * each : (rank + 1) * each, :, :]


class _ToHeads(torch.autograd.Function):
    """Forward: the all-to-all to heads. Backward: the one to tokens.

    Ranks hold: sharded -> sharded; gradient: sharded -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.cut, ctx.heads = cut, [t.size(-3) for t in tensors]
        return tuple(_to_heads(tensors, cut))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_ToTokens.apply(ctx.cut, ctx.heads, *grads)  # type: ignore[no-untyped-call]  # torch's


class _ToTokens(torch.autograd.Function):
    """Forward: the all-to-all to tokens. Backward: the one to heads.

    Ranks hold: sharded -> sharded; gradient: sharded -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, cut: Cut, heads: Sequence[int], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.cut = cut
        return tuple(_to_tokens(wholes, cut, heads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ToHeads.apply(ctx.cut, *grads)  # type: ignore[no-untyped-call]  # torch's
