"""Cross entropy of logits with classes that are split over ranks."""

from typing import Any

import torch
from torch import Tensor

from tp_shard._groups._collectives import apply, as_output
from tp_shard.nn._loss._softmax import (
    LossOptions,
    Rows,
    computed_in,
    exchange,
    fill_gradient,
    measure,
    merge,
    per_row,
    reduce_rows,
    returned_in,
)

SECOND_BACKWARD = (
    "the loss goes backward a second time, and {}; compute it again, or {} where two backward "
    "passes are needed"
)


def cross_entropy(logits: Tensor, target: Tensor, options: LossOptions, *, inplace: bool) -> Tensor:
    """Return the loss of rows of logits with split classes.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.

    Args:
        logits: This rank's logits, of shape (rows, local classes).
        target: Classes of shape (rows,), the same on all ranks.
        options: The options of the loss.
        inplace: Whether the logits are overwritten, in the forward or the backward pass.
    """
    if torch.compiler.is_compiling():
        return compiled_cross_entropy(logits, target, options)
    return apply(_CrossEntropy, logits, target, options, inplace)


class _CrossEntropy(torch.autograd.Function):
    """A loss that computes exponentials once and turns them into the gradient in the same buffer.

    With ``inplace`` that is the buffer of the logits. Otherwise it is a new one, which becomes the gradient
    of the first backward pass. A second backward pass computes the exponentials again. So do half types,
    because their buffer of float32 exponentials would be larger than the gradient.

    Forward: an all-gather. Backward: nothing.
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
            # An operation that saved the logits for its own backward pass then gets autograd's error, where
            # it would compute with overwritten values.
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


# -- Cross entropy in compiled code ---------------------------------------------------------------
# Without buffers that are filled twice: in a compiled graph buffers and passes are the compiler's concern.


def compiled_cross_entropy(logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the loss of rows of logits with split classes, in one compiled graph.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.

    Args:
        logits: This rank's logits, of shape (rows, local classes).
        target: Classes of shape (rows,), the same on all ranks.
        options: The options of the loss.
    """
    return apply(_Compiled, logits, target, options)


class _Compiled(torch.autograd.Function):
    # Forward: an all-gather. Backward: nothing.
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
    """Return the columns of :func:`measure`, for logits in the type of the computation."""
    if logits.size(1) == 0:
        found = logits.new_zeros(logits.size(0), options.columns)
        return found.index_fill(1, torch.tensor([0], device=logits.device), float("-inf"))
    maximum = logits.amax(-1)
    # A row with all classes excluded has the maximum -inf, and -inf minus -inf would be NaN.
    below = logits - maximum.clamp_min(torch.finfo(logits.dtype).min).unsqueeze(1)
    at_target = torch.where(rows.mine, logits.gather(1, rows.index.unsqueeze(1)).squeeze(1), 0)
    columns = [maximum, below.exp().sum(-1), at_target]
    if options.label_smoothing > 0:
        weight = options.local_weight
        columns.append(logits.sum(-1) if weight is None else logits @ weight)
    return torch.stack(columns, 1)
