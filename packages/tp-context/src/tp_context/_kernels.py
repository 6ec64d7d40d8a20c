"""Attention of some queries to keys that are here: whole, or in parts with their log-sum-exps."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_context._attention_inputs import Inputs, Rules
from tp_context._fused_kernels import AttentionBlock, Kernel, attend_to_block, block_gradients
from tp_context._score_blocks import ScoreBlock

# As it is before `_patches.patched` replaces it.
plain_attention = F.scaled_dot_product_attention


def mix(inputs: Inputs, rules: Rules, noise: Tensor | None) -> Tensor:
    """Return the attention of some rows to keys that are all here."""
    query, key, value, mask, bias, sinks = inputs
    if not rules.by_hand and noise is None:
        options: dict[str, Any] = {"scale": rules.scale, "enable_gqa": rules.grouped}
        return plain_attention(query, key, value, mask, **options)
    if rules.grouped:
        shared = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(shared, -3), value.repeat_interleave(shared, -3)
    scores = query @ key.transpose(-1, -2) * scale_of(query, rules)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if bias is not None:
        scores = scores + bias
    hidden = None
    if mask is not None:
        if rules.by_hand:
            lowest = torch.finfo(scores.dtype).min
        else:
            lowest = -torch.inf
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:
            scores = scores + mask
        if not rules.by_hand:  # a query that sees nothing is zero in torch's function, and not NaN
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(hidden, 0.0)
    if sinks is not None:
        column = sinks.reshape(-1, 1, 1).expand(*scores.shape[:-3], -1, scores.size(-2), 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    # In float32 where transformers' own functions are, so that the numbers are theirs.
    if rules.by_hand and bias is None:
        exact = torch.float32
    else:
        exact = scores.dtype
    weights = scores.softmax(-1, dtype=exact).to(query.dtype)[..., : key.size(-2)]
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if noise is not None:
        weights = weights * (noise.to(weights.dtype) / (1 - rules.dropout))
    return weights @ value


def scale_of(query: Tensor, rules: Rules) -> float:
    return query.size(-1) ** -0.5 if rules.scale is None else rules.scale


def sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class Sums:
    """Attention to some keys after others, joined by the log-sum-exps of scores."""

    def __init__(self, inputs: Inputs) -> None:
        self._query = inputs.query
        self._features = inputs.value.size(-1)
        # A block with all rows is the result if no other follows: nothing is copied.
        self._only: tuple[Tensor, Tensor] | None = None
        self._begun: list[tuple[int, int]] = []  # the rows that have a block
        self._out = self._total = inputs.query.new_empty(0)

    def add(self, block: ScoreBlock, part: Tensor, sums: Tensor) -> None:
        """Add the attention of the rows of a block to its keys, with their log-sum-exps."""
        if not self._begun and (block.first, block.last) == (0, self._query.size(2)):
            self._only = part, sums
            self._begun.append((block.first, block.last))
            return
        self._need_memory()
        rows = slice(block.first, block.last)
        out, before = self._out[:, :, rows], self._total[:, :, rows]
        if all(last <= block.first or block.last <= first for first, last in self._begun):
            self._begun.append((block.first, block.last))
            out.copy_(part)
            before.copy_(sums)
            return
        joined = torch.logaddexp(before, sums.to(before.dtype))
        # Where nothing is seen yet, -inf less -inf.
        first, second = ((t - joined).exp().nan_to_num(0.0)[..., None] for t in (before, sums))
        out.mul_(first).addcmul_(part.to(out.dtype), second)
        before.copy_(joined)

    def _need_memory(self) -> None:
        if self._total.numel():
            return
        query, exact = self._query, sum_dtype(self._query)
        batch, heads, count = query.shape[:3]
        # In the layout of torch's function: models flatten heads without a copy.
        shape = (batch, count, heads, self._features)
        self._out = query.new_zeros(shape, dtype=exact).transpose(1, 2)
        self._total = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)
        if self._only is not None:
            part, sums = self._only
            self._out.copy_(part)
            self._total.copy_(sums)
            self._only = None

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output in the dtype of queries, and the log-sum-exps."""
        if self._only is not None:
            out, total = self._only
            return out.to(self._query.dtype), total.to(sum_dtype(self._query))
        self._need_memory()
        return self._out.to(self._query.dtype), self._total


def _added(block: ScoreBlock, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the additive mask of a block, of four dimensions."""
    sees = block.sees
    if sees is None:
        return None
    if sees.dtype is torch.bool:
        sees = torch.where(sees, torch.zeros((), dtype=query.dtype, device=query.device), -torch.inf)
    sees = sees[(None,) * (4 - sees.dim())]
    return sees.expand(-1, -1, query.size(2), key.size(2))


def partial_attention(
    kernel: Kernel | None, inputs: Inputs, block: ScoreBlock, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Return attention to some of the keys, and the log-sum-exp of scores: -inf where nothing is seen.

    Without a kernel, the scores of the block are in memory.
    """
    query, key, value = inputs[:3]
    if kernel is not None:
        added = _added(block, query, key)
        return attend_to_block(kernel, AttentionBlock(query, key, value, added, block.is_causal, rules.scale))
    scores, _ = _scores(query, key, block, rules)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights @ _spread(value, query).to(weights.dtype), sums


def partial_attention_backward(
    kernel: Kernel | None,
    grad: Tensor,
    inputs: Inputs,
    results: Sequence[Tensor],
    block: ScoreBlock,
    rules: Rules,
) -> tuple[Tensor, ...]:
    """Return what some of the keys add to gradients, with the output and log-sum-exp of all keys."""
    query, key, value = inputs[:3]
    out, sums = results
    if kernel is not None:
        added = _added(block, query, key)
        whole = AttentionBlock(query, key, value, added, block.is_causal, rules.scale)
        return block_gradients(kernel, grad, whole, out, sums)
    scores, scale = _scores(query, key, block, rules)
    weights = (scores - sums[..., None]).exp()
    exact = weights.dtype
    grad, out = grad.to(exact), out.to(exact)
    slopes = grad @ _spread(value, query).to(exact).mT - (grad * out).sum(-1, keepdim=True)
    slopes = weights * slopes * scale
    of_keys, of_values = slopes.mT @ query.to(exact), weights.mT @ grad
    shared = query.size(1) // key.size(1)
    of_keys, of_values = (t.unflatten(1, (-1, shared)).sum(2) for t in (of_keys, of_values))
    return slopes @ _spread(key, query).to(exact), of_keys, of_values


def _scores(query: Tensor, key: Tensor, block: ScoreBlock, rules: Rules) -> tuple[Tensor, float]:
    scale = scale_of(query, rules)
    scores = (query @ _spread(key, query).mT).to(sum_dtype(query)) * scale
    if block.is_causal:
        square = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~square, -torch.inf)
    if block.sees is not None:
        scores = scores.masked_fill(~block.sees, -torch.inf)
    return scores, scale


def _spread(tensor: Tensor, query: Tensor) -> Tensor:
    """Return keys or values for each head of the queries."""
    return tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)
