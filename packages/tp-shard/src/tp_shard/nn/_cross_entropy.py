"""Cross entropy over class shards, alone and fused with the head that makes the logits."""

from typing import Any

import torch
from torch import Tensor

from tp_shard._comm import start_all_reduce_
from tp_shard.nn._class_rows import LossOptions, Merged, Rows, exchange, fill_gradient, measure, merge

__all__ = ["cross_entropy", "linear_cross_entropy"]

_SECOND_BACKWARD = (
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
    return _CrossEntropy.apply(logits, target, options, inplace)  # type: ignore[no-any-return,no-untyped-call]  # torch leaves apply untyped


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return the loss of the logits ``input @ weight.T + bias``, of which a chunk of rows exists at a time.

    Forward: an all-gather of 3 or 4 numbers per row for each chunk, and where gradients are needed
    an all-reduce of the input's gradient, chunk by chunk, beside the computation of the next.
    Backward: nothing; with reduction "none" the logits are computed again, the all-gather is one
    and the all-reduce happens here.

    Args:
        input: Of shape (rows, in), the same on all ranks.
        weight: Of shape (local classes, in).
        bias: Of shape (local classes,).
        target: Of shape (rows,), the same on all ranks.
        options: What is computed.
        chunk_rows: How many rows of logits exist at a time.
    """
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
    if needed and options.reduction != "none":
        return _FusedAtOnce.apply(input, weight, bias, target, options, chunk_rows)  # type: ignore[no-any-return,no-untyped-call]  # as above
    return _FusedTwice.apply(input, weight, bias, target, options, chunk_rows)  # type: ignore[no-any-return,no-untyped-call]  # as above


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _returned_in(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Torch's own loss is of the logits' type, and under autocast a float32."""
    return dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype


def _reduce(loss: Tensor, factor: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / factor.sum() if reduction == "mean" else loss.sum()


def _per_row(grad: Tensor, rows_valid: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    grad = grad.to(dtype)
    if denominator is not None:
        grad = grad / denominator
    return torch.where(rows_valid, grad, 0)


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits and computes their exponentials twice, or, in place, once.

    The first needs no buffer but the gradient's own; the second none at all: logits become
    exponentials, and these the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions, inplace: bool) -> Tensor:
        dtype = _computed_in(logits.dtype)
        rows = Rows(target, options, dtype)
        spent = inplace and logits.dtype == dtype and logits.requires_grad
        found = measure(logits.detach(), rows, options, dtype, inplace=spent)
        merged = merge(exchange(found, rows, options), rows, options)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        ctx.options, ctx.inplace, ctx.spent, ctx.dtype = options, inplace, spent, dtype
        ctx.buffer = logits.detach() if inplace else None
        if inplace:
            # Whoever saved the logits for a backward pass of their own gets autograd's error.
            torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(
            None if inplace else logits,
            found[:, 0].clone() if spent else None,
            merged.lse,
            merged.softmax_factor,
            merged.target_factor,
            rows.index,
            rows.mine,
            rows.valid,
            denominator,
        )
        return _reduce(merged.loss, rows.factor, options.reduction).to(_returned_in(logits, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, maximum, lse, softmax_factor, target_factor, index, mine, valid, denominator = (
            ctx.saved_tensors
        )
        if ctx.inplace:
            if ctx.buffer is None:
                raise RuntimeError(
                    _SECOND_BACKWARD.format("inplace=True gave its logits to the first", "leave it out")
                )
            logits, ctx.buffer = ctx.buffer, None
            out = logits
        else:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        fill_gradient(
            out,
            logits,
            maximum,
            (lse, softmax_factor, target_factor),
            (index, mine),
            _per_row(grad, valid, denominator, ctx.dtype),
            ctx.options,
        )
        return out, None, None, None


class _FusedAtOnce(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's logits are there; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = _computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        one = torch.ones((), dtype=dtype, device=x.device)
        row_grad = _per_row(one, rows.valid, denominator, dtype)
        grads = _Gradients(x, weight, bias, options, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=dtype, device=x.device)
        for a, b in _chunks(x.size(0), chunk_rows):
            logits = _logits(x[a:b], weight, bias)
            part = rows.part(a, b)
            spent = logits.dtype == dtype
            found = measure(logits, part, options, dtype, inplace=spent)
            merged = merge(exchange(found, part, options), part, options)
            total += merged.loss.sum()
            maximum = found[:, 0] if spent else None
            _to_gradient(logits, maximum, merged, part, row_grad[a:b], options)
            grads.add(logits, a, b)
            del logits  # before the next chunk's are made
        grads.wait()
        ctx.grads = grads.x, grads.weight, grads.bias
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        loss = total / denominator if denominator is not None else total
        return loss.to(_returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError(
                _SECOND_BACKWARD.format("its gradients were given to the first", 'use reduction="none"')
            )
        grads, ctx.grads = ctx.grads, None
        scale = grad.device.type != "cpu" or float(grad) != 1.0  # asking a device would wait for it
        scaled = [
            None if g is None else (g.mul_(grad) if scale else g).to(dtype)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)


class _FusedTwice(torch.autograd.Function):
    """Computes each chunk's logits in both passes: the gradients of the rows' losses differ."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = _computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        found = torch.empty(x.size(0), options.columns, dtype=dtype, device=x.device)
        for a, b in _chunks(x.size(0), chunk_rows) if x.size(0) else ():
            logits = _logits(x[a:b], weight, bias)
            found[a:b] = measure(logits, rows.part(a, b), options, dtype, inplace=logits.dtype == dtype)
            del logits  # before the next chunk's are made
        merged = merge(exchange(found, rows, options), rows, options)
        ctx.options, ctx.chunk_rows, ctx.dtype = options, chunk_rows, dtype
        ctx.save_for_backward(
            x, weight, bias, target, merged.lse, merged.softmax_factor, merged.target_factor
        )
        return _reduce(merged.loss, rows.factor, options.reduction).to(_returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, target, lse, softmax_factor, target_factor = ctx.saved_tensors
        rows = Rows(target, ctx.options, ctx.dtype)
        row_grad = _per_row(grad, rows.valid, None, ctx.dtype)
        grads = _Gradients(x, weight, bias, ctx.options, ctx.needs_input_grad[:3])
        for a, b in _chunks(x.size(0), ctx.chunk_rows):
            logits = _logits(x[a:b], weight, bias)
            merged = Merged(lse[a:b], lse[a:b], softmax_factor[a:b], target_factor[a:b])
            _to_gradient(logits, None, merged, rows.part(a, b), row_grad[a:b], ctx.options)
            grads.add(logits, a, b)
            del logits  # as above
        grads.wait()
        made = [
            None if g is None else g.to(t.dtype)
            for g, t in ((grads.x, x), (grads.weight, weight), (grads.bias, bias))
        ]
        return (*made, None, None, None)


class _Gradients:
    """Sums of the head's gradients over chunks of rows."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> None:
        dtype = _computed_in(weight.dtype)
        self._x, self._weight, self._options = x, weight, options
        self.x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None
        self._works: list[Any] = []

    def add(self, grad_logits: Tensor, start: int, stop: int) -> None:
        """Add what a chunk of rows gives."""
        if self.x is not None:
            mine = self.x[start:stop]
            torch.mm(grad_logits, self._weight, out=mine)
            if self._options.group.size > 1:
                layer = self._options.layer or "the head and loss"
                self._works.append(start_all_reduce_(mine, self._options.group, layer=layer))
        if self.weight is not None:
            if self.weight.dtype == grad_logits.dtype:
                self.weight.addmm_(grad_logits.t(), self._x[start:stop])
            else:
                self.weight.add_(grad_logits.t().mm(self._x[start:stop]))
        if self.bias is not None:
            self.bias.add_(grad_logits.sum(0, dtype=self.bias.dtype))

    def wait(self) -> None:
        """Wait until the ranks have summed the input's gradient."""
        for work in self._works:
            work.wait()


def _chunks(rows: int, size: int) -> list[tuple[int, int]]:
    # One chunk at least: the ranks check their targets with it.
    return [(a, min(rows, a + size)) for a in range(0, max(rows, 1), size)]


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _to_gradient(
    logits: Tensor,
    maximum: Tensor | None,
    merged: Merged,
    rows: Rows,
    grad: Tensor,
    options: LossOptions,
) -> None:
    """Turn a chunk's logits into their gradient, where they are."""
    fill_gradient(
        logits,
        logits,
        maximum,
        (merged.lse, merged.softmax_factor, merged.target_factor),
        (rows.index, rows.mine),
        grad,
        options,
    )
