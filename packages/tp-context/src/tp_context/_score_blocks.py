"""The blocks of an attention's scores: which rows see which keys, so that no mask of all is needed."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tp_context._attention_inputs import Inputs, QueryKeyCuts, Rules
from tp_context._slices import Cut

ROWS = 256
"""Rows at a time with a mask or scores in memory: all would need more memory than the split saves."""


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
        if table.size(-1) > 1:
            return table[..., self.begin : self.end]
        return table


def score_blocks(inputs: Inputs, rules: Rules) -> Iterator[ScoreBlock]:
    """Return blocks of few rows that do all the work; each has the keys alone that one of its rows sees.

    Their scores may be in memory.
    """
    mask = inputs.mask
    if rules.is_causal:
        return _causal_blocks(inputs, rules)
    if mask is not None and mask.dim() > 1 and mask.size(-2) > 1:
        return _masked_blocks(inputs, mask, rules)
    return _plain_blocks(inputs, ROWS)


def _causal_blocks(inputs: Inputs, rules: Rules) -> Iterator[ScoreBlock]:
    """Yield rows that see the keys up to their own."""
    device = inputs.query.device
    if rules.rows is None:
        ranges = [(0, inputs.query.size(-2))]
    else:
        ranges = rules.rows.own
    at = 0
    for begin, end in ranges:
        for first in range(begin, end, ROWS):
            last = min(first + ROWS, end)
            sees = torch.arange(first, last, device=device)[:, None] >= torch.arange(last, device=device)
            yield ScoreBlock(at, at + last - first, 0, last, sees)
            at += last - first


def _masked_blocks(inputs: Inputs, mask: Tensor, rules: Rules) -> Iterator[ScoreBlock]:
    """Yield neighbors in the sequence, with the keys from the first to the last that one of them sees."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    steps = list(_steps(rules.rows, count, ROWS))
    ranges = [(0, length)] * len(steps)
    if mask.size(-1) > 1:
        ranges = _seen_keys(mask, steps)
    for (first, last), (begin, end) in zip(steps, ranges, strict=True):
        block = ScoreBlock(first, last, begin, end, None)
        yield block._replace(sees=block.part(mask))


def _plain_blocks(inputs: Inputs, step: int) -> Iterator[ScoreBlock]:
    """Yield rows that see the same keys: all, or those that a mask of one row shows."""
    count, length = inputs.query.size(-2), inputs.key.size(-2)
    for first, last in _steps(None, count, step):
        block = ScoreBlock(first, last, 0, length, None)
        if inputs.mask is not None:
            block = block._replace(sees=block.part(inputs.mask))
        yield block


def _steps(rows: Cut | None, count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of each block, which are neighbors in the sequence."""
    at = 0
    if rows is None:
        lengths = [count]
    else:
        lengths = [last - first for first, last in rows.own]
    for length in lengths:
        for first in range(at, at + length, step):
            yield first, min(first + step, at + length)
        at += length


def _seen_keys(mask: Tensor, steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the range of keys that the rows of each step see.

    If a row is fully masked, it is the range of all keys: the softmax over them may be uniform.
    """
    facts = []
    for first, last in steps:
        sees = mask[..., first:last, :]
        if mask.dtype is not torch.bool:
            sees = sees.detach() > torch.finfo(mask.dtype).min / 2
        sees = sees.reshape(-1, sees.size(-1))
        facts.append(torch.stack([*_ends(sees), sees.any(-1).all().long()]))
    ranges = []
    for begin, end, all_see in _read(facts):
        if all_see:
            ranges.append((begin, end))
        else:
            ranges.append((0, mask.size(-1)))
    return ranges


def _ends(sees: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of the columns of (rows, columns) that a row sees, and the one after the last."""
    seen = sees.any(0).byte()  # whose argmax is the first one
    return seen.argmax(), len(seen) - seen.flip(0).argmax()


def _read(facts: list[Tensor]) -> list[list[int]]:
    """Return the numbers of each tensor. The host waits for the device once, for all of them."""
    if not facts:
        return []
    numbers: list[list[int]] = torch.stack(facts).tolist()
    return numbers


def fused_blocks(inputs: Inputs, rules: Rules) -> Iterator[ScoreBlock]:
    """Yield blocks for a fused kernel; rows in several of them have the sum. A causal mask costs nothing."""
    mask = inputs.mask
    if not rules.is_causal:
        if mask is not None and mask.dim() > 1 and mask.size(-2) > 1:
            yield from _masked_blocks(inputs, mask, rules)
        else:
            yield from _plain_blocks(inputs, max(inputs.query.size(-2), 1))
        return
    if rules.rows is None:
        ranges = [(0, inputs.query.size(-2))]
    else:
        ranges = rules.rows.own
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
        if not keys.counts[source]:
            return
        columns = mask
        if mask.size(-1) > 1:
            columns = keys.take(mask, -1, source)
        steps = list(_steps(rows, rows.tokens, ROWS))
        blocks = [ScoreBlock(first, last, 0, keys.counts[source], None) for first, last in steps]
        facts = []
        for block in blocks:
            sees = block.part(columns)
            sees = sees.reshape(-1, sees.size(-1))
            facts.append(torch.stack([*_ends(sees), sees.count_nonzero()]))
        for block, (begin, end, count) in zip(blocks, _read(facts), strict=True):
            if not count:
                continue
            sees, keys_seen = block.part(columns), (block.begin, block.end)
            if sees.size(-1) > 1:
                keys_seen = (begin, end)
                sees = sees[..., begin:end]
            rest: Tensor | None = sees
            if count == sees.numel():  # all are seen
                rest = None
            yield ScoreBlock(block.first, block.last, *keys_seen, rest)
        return
    at = 0
    for begin, end in rows.own:
        to = 0
        for left, right in keys.ranges[source]:  # the same or apart, as each belongs to one rank
            if left <= begin < end and left < right:
                yield ScoreBlock(at, at + end - begin, to, to + right - left, None, is_causal=left == begin)
            to += right - left
        at += end - begin


def tiles(blocks: Iterable[ScoreBlock], device: torch.device) -> Iterator[ScoreBlock]:
    """Yield the same in blocks of few rows, whose scores may be in memory."""
    for block in blocks:
        for first in range(block.first, block.last, ROWS):
            last = min(first + ROWS, block.last)
            end, sees = block.end, block.sees
            if block.is_causal:
                seen = last - block.first
                end = block.begin + seen
                own = torch.arange(first - block.first, seen, device=device)
                sees = own[:, None] >= torch.arange(seen, device=device)
            elif sees is not None and sees.size(-2) > 1:
                sees = sees[..., first - block.first : last - block.first, :]
            yield ScoreBlock(first, last, block.begin, end, sees)
