"""Cross entropy of split logits in compiled code, where buffers and passes are the compiler's concern."""

from typing import Any

import torch
from torch import Tensor

from tp_shard._groups._autograd import apply, as_output
from tp_shard.nn._loss._exchange import exchange
from tp_shard.nn._loss._options import LossOptions, Rows, computed_in, returned_in
from tp_shard.nn._loss._softmax_parts import merge, per_row, reduce_rows

__all__ = ["compiled_cross_entropy"]


def compiled_cross_entropy(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the loss of rows of logits whose classes are split, in one graph.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.

    Args:
        logits: Of shape (rows, local classes).
        target: Of shape (rows,), the same on all ranks.
        options: What is computed.
    """
    return apply(_Compiled, logits, target, options)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
        dtype = computed_in(logits.dtype)
        rows = Rows(target, options, dtype)
        merged = merge(exchange(_measure(logits.to(dtype), rows, options), rows, options), rows, options)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        ctx.options, ctx.dtype = options, dtype
        ctx.save_for_backward(
            logits,
            merged.lse,
            merged.softmax_factor,
            merged.target_factor,
            rows.index,
            rows.mine,
            rows.valid,
            denominator,
        )
        loss = reduce_rows(merged.loss, rows.factor, options.reduction)
        return as_output(loss.to(returned_in(logits, dtype)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, lse, softmax_factor, target_factor, index, mine, valid, denominator = ctx.saved_tensors
        options, dtype = ctx.options, ctx.dtype
        row_grad = per_row(grad, valid, denominator, dtype)
        out = torch.exp(logits.to(dtype) - lse.unsqueeze(1)) * (softmax_factor * row_grad).unsqueeze(1)
        if options.label_smoothing > 0:
            spread = (row_grad * options.spread).unsqueeze(1)
            weight = options.local_weight
            out = out - (spread if weight is None else spread * weight)
        if logits.size(1):
            at_target = torch.where(mine, -target_factor * row_grad, 0).unsqueeze(1)
            out = out.scatter_add(1, index.unsqueeze(1), at_target)
        return out.to(logits.dtype), None, None


def _measure(logits: Tensor, rows: Rows, options: LossOptions) -> Tensor:
    """Return what :func:`measure` does, of logits in the type that is computed in."""
    if logits.size(1) == 0:
        found = logits.new_zeros(logits.size(0), options.columns)
        return found.index_fill(1, torch.tensor([0], device=logits.device), float("-inf"))
    maximum = logits.amax(-1)
    # A row of which all classes are excluded has no maximum to subtract.
    below = logits - maximum.clamp_min(torch.finfo(logits.dtype).min).unsqueeze(1)
    at_target = torch.where(rows.mine, logits.gather(1, rows.index.unsqueeze(1)).squeeze(1), 0)
    columns = [maximum, below.exp().sum(-1), at_target]
    if options.label_smoothing > 0:
        weight = options.local_weight
        columns.append(logits.sum(-1) if weight is None else logits @ weight)
    return torch.stack(columns, 1)
