"""The blocks of an attention's scores: which rows see which keys, so that no mask of all is needed."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._slices import Cut

_BLOCK = 256
"""Rows of queries with a mask at a time: a mask of all would need more memory than the split saves."""


class ScoreBlock(NamedTuple):
    """Rows ``first`` to ``last`` of the queries, keys ``begin`` to ``end``, and which see which.

    ``sees`` may be an additive mask. If ``is_causal``, rows and keys are the same ones.
    """

    first: int
    last: int
    begin: int
    end: int
    sees: Tensor | None
    is_causal: bool = False

    def of(self, inputs: Inputs) -> Inputs:
        """Return the inputs of this block."""
        query, key, value, _, bias, sinks = inputs
        query = query[..., self.first : self.last, :]
        key = key[..., self.begin : self.end, :]
        value = value[..., self.begin : self.end, :]
        if bias is not None:
            bias = self.part(bias)
        return Inputs(query, key, value, self.sees, bias, sinks)

    def part(self, table: Tensor) -> Tensor:
        """Return a view of what a table of queries and keys has for this block."""
        if table.size(-2) > 1:
            table = table[..., self.first : self.last, :]
        return table[..., self.begin : self.end] if table.size(-1) > 1 else table


def score_blocks(inputs: Inputs, rules: Rules) -> Iterator[ScoreBlock]:
    """Return blocks of rows that do all the work; each has the keys alone that one of its rows sees."""
    mask = inputs.mask
    # Scores in memory are of few rows at a time, whatever the mask.
    in_memory = rules.by_hand or rules.dropout > 0
    if rules.is_causal:
        return _causal_blocks(inputs, rules, in_memory=in_memory)
    if mask is not None and mask.dim() > 1 and mask.size(-2) > 1:
        return _masked_blocks(inputs, mask, rules)
    return _plain_blocks(inputs, in_memory=in_memory)


def _causal_blocks(inputs: Inputs, rules: Rules, *, in_memory: bool) -> Iterator[ScoreBlock]:
    """Yield rows that see the keys up to their own: those at the beginning of the sequence as one block."""
    device = inputs.query.device
    ranges = [(0, inputs.query.size(-2))] if rules.rows is None else rules.rows.own
    at = 0
    for begin, end in ranges:
        if begin == 0 and end and not in_memory:
            yield ScoreBlock(0, end, 0, end, None, is_causal=True)
            at = end
            continue
        for first in range(begin, end, _BLOCK):
            last = min(first + _BLOCK, end)
            sees = torch.arange(first, last, device=device)[:, None] >= torch.arange(last, device=device)
            yield ScoreBlock(at, at + last - first, 0, last, sees)
            at += last - first


def _masked_blocks(inputs: Inputs, mask: Tensor, rules: Rules) -> Iterator[ScoreBlock]:
    """Yield neighbors in the sequence, with the keys from the first to the last that one of them sees."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    for first, last in _steps(rules.rows, count, _BLOCK):
        begin, end = 0, length
        if mask.size(-1) > 1:
            begin, end = _seen_keys(mask[..., first:last, :])
        block = ScoreBlock(first, last, begin, end, None)
        yield block._replace(sees=block.part(mask))


def _plain_blocks(inputs: Inputs, *, in_memory: bool) -> Iterator[ScoreBlock]:
    """Yield rows that see the same keys: all, or those that a mask of one row shows."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    step = _BLOCK if in_memory else max(count, 1)
    for first, last in _steps(None, count, step):
        block = ScoreBlock(first, last, 0, length, None)
        if inputs.mask is not None:
            block = block._replace(sees=block.part(inputs.mask))
        yield block


def _steps(rows: Cut | None, count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each block, which are neighbors in the sequence."""
    at = 0
    lengths = [count] if rows is None else [last - first for first, last in rows.own]
    for length in lengths:
        for first in range(at, at + length, step):
            yield first, min(first + step, at + length)
        at += length


def _seen_keys(mask: Tensor) -> tuple[int, int]:
    """Return the range of keys that rows see.

    If a row is fully masked, it is the range of all keys: the softmax over them may be uniform.
    """
    sees = mask
    if mask.dtype is not torch.bool:
        sees = mask.detach() > torch.finfo(mask.dtype).min / 2
    sees = sees.reshape(-1, sees.size(-1))
    if not bool(sees.any(-1).all()):
        return 0, sees.size(-1)
    seen = sees.any(0).nonzero()
    return int(seen[0]), int(seen[-1]) + 1


def fused_blocks(inputs: Inputs, rules: Rules) -> Iterator[ScoreBlock]:
    """Yield blocks for torch's kernel; rows in several of them have the sum. A causal mask costs nothing."""
    if not rules.is_causal:
        yield from score_blocks(inputs, rules)
        return
    ranges = [(0, inputs.query.size(-2))] if rules.rows is None else rules.rows.own
    at = 0
    for begin, end in ranges:
        rows = at, at + end - begin
        if 0 < begin < end:
            yield ScoreBlock(*rows, 0, begin, None)
        if begin < end:
            yield ScoreBlock(*rows, begin, end, None, is_causal=True)
        at = rows[1]


def ring_blocks(
    mask: Tensor | None, cuts: QueryKeyCuts, source: int, *, is_causal: bool = False
) -> Iterator[ScoreBlock]:
    """Yield what this rank's queries see of a rank's keys; what they do not is skipped."""
    rows, keys = cuts
    if mask is None and not is_causal:
        yield ScoreBlock(0, rows.tokens, 0, keys.counts[source], None)
        return
    if mask is not None:
        columns = mask
        if mask.size(-1) > 1:
            columns = keys.take(mask, -1, source)
        for first, last in _steps(rows, rows.tokens, _BLOCK):
            sees = ScoreBlock(first, last, 0, keys.counts[source], None).part(columns)
            seen = sees.reshape(-1, sees.size(-1)).any(0).nonzero()
            if not len(seen):
                continue
            begin, end = 0, keys.counts[source]
            if sees.size(-1) > 1:
                begin, end = int(seen[0]), int(seen[-1]) + 1
            sees = sees[..., begin:end]
            yield ScoreBlock(first, last, begin, end, None if bool(sees.all()) else sees)
        return
    at = 0
    for begin, end in rows.own:
        to = 0
        for left, right in keys.ranges[source]:  # the same or apart, as each belongs to one rank
            if left <= begin < end and left < right:
                yield ScoreBlock(at, at + end - begin, to, to + right - left, None, is_causal=left == begin)
            to += right - left
        at += end - begin
