"""Cross entropy of logits whose classes are split over ranks."""

from typing import Any

import torch
from torch import Tensor

from tp_shard._groups._autograd import apply
from tp_shard.nn._loss._compiled import compiled_cross_entropy
from tp_shard.nn._loss._exchange import exchange
from tp_shard.nn._loss._options import LossOptions, Rows, computed_in, returned_in
from tp_shard.nn._loss._softmax_parts import fill_gradient, measure, merge, per_row, reduce_rows

__all__ = ["SECOND_BACKWARD", "cross_entropy"]

SECOND_BACKWARD = (
    "the loss goes backward a second time, and {}; compute it again, or {} where two backward "
    "passes are needed"
)


def cross_entropy(logits: Tensor, target: Tensor, options: LossOptions, *, inplace: bool) -> Tensor:
    """Return the loss of rows of logits whose classes are split.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.

    Args:
        logits: Of shape (rows, local classes).
        target: Of shape (rows,), the same on all ranks.
        options: What is computed.
        inplace: Whether the logits are overwritten, in the forward or the backward pass.
    """
    if torch.compiler.is_compiling():
        return compiled_cross_entropy(logits, target, options)
    return apply(_CrossEntropy, logits, target, options, inplace)


class _CrossEntropy(torch.autograd.Function):
    """Computes exponentials once and turns them into the gradient, where they are.

    In place they take the logits' own buffer. Otherwise they have one of their own, which becomes the
    gradient of the first backward pass; for a second one they are computed again, as they are for half
    types, of which a buffer of exponentials would be larger than the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions, inplace: bool) -> Tensor:
        dtype = computed_in(logits.dtype)
        rows = Rows(target, options, dtype)
        detached = logits.detach()
        keep = None
        if ctx.needs_input_grad[0] and logits.dtype == dtype:
            keep = detached if inplace else torch.empty_like(detached, memory_format=torch.contiguous_format)
        found = measure(detached, rows, options, dtype, keep)
        merged = merge(exchange(found, rows, options), rows, options)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        ctx.options, ctx.inplace, ctx.dtype = options, inplace, dtype
        ctx.buffer = detached if inplace else keep
        if inplace:
            # Whoever saved the logits for a backward pass of their own gets autograd's error.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(
            None if inplace else logits,
            None if keep is None else found[:, 0].clone(),
            merged.lse,
            merged.softmax_factor,
            merged.target_factor,
            rows.index,
            rows.mine,
            rows.valid,
            denominator,
        )
        return reduce_rows(merged.loss, rows.factor, options.reduction).to(returned_in(logits, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, maximum, lse, softmax_factor, target_factor, index, mine, valid, denominator = (
            ctx.saved_tensors
        )
        out, ctx.buffer = ctx.buffer, None
        if out is not None:
            logits = out
        elif ctx.inplace:
            raise RuntimeError(
                SECOND_BACKWARD.format("inplace=True gave its logits to the first", "leave it out")
            )
        else:
            out, maximum = torch.empty_like(logits, memory_format=torch.contiguous_format), None
        fill_gradient(
            out,
            logits,
            maximum,
            (lse, softmax_factor, target_factor),
            (index, mine),
            per_row(grad, valid, denominator, ctx.dtype),
            ctx.options,
        )
        return out, None, None, None
