"""Attention of some queries to keys that are here: whole, or in parts with their log-sum-exps."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_context._attention_inputs import Inputs, Rules
from tp_context._score_blocks import ScoreBlock

# As it is before `_patches.patched` replaces it.
plain_attention = F.scaled_dot_product_attention


def mix(inputs: Inputs, rules: Rules, noise: Tensor | None, *, is_causal: bool) -> Tensor:
    """Return the attention of some rows to keys that are all here."""
    query, key, value, mask, bias, sinks = inputs
    if not rules.by_hand and noise is None:
        options: dict[str, Any] = {"scale": rules.scale, "enable_gqa": rules.grouped}
        return plain_attention(query, key, value, mask, 0.0, is_causal, **options)
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
        lowest = torch.finfo(scores.dtype).min if rules.by_hand else -torch.inf
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
        if not rules.by_hand:  # a query that sees nothing is zero in torch's function, and not NaN
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(hidden, 0.0)
    if sinks is not None:
        column = sinks.reshape(-1, 1, 1).expand(*scores.shape[:-3], -1, scores.size(-2), 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    # In float32 where transformers' own functions are, so that the numbers are theirs.
    exact = torch.float32 if rules.by_hand and bias is None else scores.dtype
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
        query, exact = inputs.query, sum_dtype(inputs.query)
        batch, heads, count = query.shape[:3]
        # In the layout of torch's function: models flatten heads without a copy.
        shape = (batch, count, heads, inputs.value.size(-1))
        self.dtype = query.dtype
        self.out = query.new_zeros(shape, dtype=exact).transpose(1, 2)
        self.total = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)

    def add(self, block: ScoreBlock, part: Tensor, sums: Tensor) -> None:
        """Add the attention of the rows of a block to its keys, with their log-sum-exps."""
        rows = slice(block.first, block.last)
        out, before = self.out[:, :, rows], self.total[:, :, rows]
        joined = torch.logaddexp(before, sums.to(before.dtype))
        # Where nothing is seen yet, -inf less -inf.
        first, second = ((t - joined).exp().nan_to_num(0.0)[..., None] for t in (before, sums))
        out.mul_(first).addcmul_(part.to(out.dtype), second)
        before.copy_(joined)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output in the dtype of queries, and the log-sum-exps."""
        return self.out.to(self.dtype), self.total


def is_fused(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's kernel takes these."""
    return query.device.type == "cpu" and query.size(-1) == value.size(-1)


def _added(block: ScoreBlock, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the additive mask of a block, of four dimensions."""
    sees = block.sees
    if sees is None:
        return None
    if sees.dtype is torch.bool:
        sees = torch.where(sees, torch.zeros((), dtype=query.dtype, device=query.device), -torch.inf)
    sees = sees[(None,) * (4 - sees.dim())]
    return sees.expand(-1, -1, query.size(2), key.size(2))


def partial_attention(inputs: Inputs, block: ScoreBlock, rules: Rules) -> tuple[Tensor, Tensor]:
    """Return attention to some of the keys, and the log-sum-exp of scores: -inf where nothing is seen."""
    query, key, value = inputs[:3]
    added = _added(block, query, key)
    if is_fused(query, value):
        # Private in torch 2.13, and the only one to return log-sum-exps: a test notices if it goes.
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, block.is_causal, attn_mask=added, scale=rules.scale
        )
        if added is not None:  # the kernel says 0 of a row that sees nothing
            sums = sums.masked_fill((added == -torch.inf).all(-1), -torch.inf)
        return out, sums
    scores, _ = _scores(query, key, block, rules)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.nan_to_num(neginf=0.0)[..., None]).exp()
    return weights @ _spread(value, query).to(weights.dtype), sums


def partial_attention_backward(
    grad: Tensor, inputs: Inputs, results: Sequence[Tensor], block: ScoreBlock, rules: Rules
) -> tuple[Tensor, ...]:
    """Return what some of the keys add to gradients, with the output and log-sum-exp of all keys."""
    query, key, value = inputs[:3]
    out, sums = results
    if is_fused(query, value):
        grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, sums, 0.0, block.is_causal,
            attn_mask=_added(block, query, key), scale=rules.scale,
        )  # fmt: skip
        return grads
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
