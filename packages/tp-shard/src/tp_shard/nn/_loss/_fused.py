"""Losses fused with their head over class shards, with one chunk of logits in memory at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tp_shard._groups._collectives import apply, start_all_reduce_
from tp_shard.nn._loss._softmax import (
    SECOND_BACKWARD,
    LossOptions,
    Merged,
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

# -- The linear head: logits ``x @ weight.T + bias`` ----------------------------------------------


class LinearHead:
    """A linear head over class shards.

    Args:
        x: Features of shape (rows, in).
        weight: This rank's shard, of shape (local classes, in).
        bias: This rank's shard, of shape (local classes,).
        options: The options of the loss, with the group that communicates.
        needed: Whether the gradients of the three are needed.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        self._products = Products(x, weight, options, needed)
        dtype = computed_in(weight.dtype)
        self._grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def logits(self, start: int, stop: int, rows: Rows) -> Tensor:  # noqa: ARG002 - the protocol's
        """Return the logits of some rows."""
        x, weight = self._x[start:stop], self._weight
        return x.mm(weight.t()) if self._bias is None else torch.addmm(self._bias, x, weight.t())

    def add(self, grad: Tensor, start: int, stop: int, rows: Rows) -> None:  # noqa: ARG002 - as above
        """Add the gradients from the gradient of some rows' logits.

        Collectives: starts an all-reduce of the features' gradient.
        """
        self._products.add(grad, start, stop)
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0, dtype=self._grad_bias.dtype))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are needed."""
        return (*self._products.wait(), self._grad_bias)


class Products:
    """The gradients of the two factors of ``x @ weight.T``, summed over chunks of rows."""

    def __init__(self, x: Tensor, weight: Tensor, options: LossOptions, needed: tuple[bool, ...]) -> None:
        dtype = computed_in(weight.dtype)
        self._x, self._weight, self._options = x, weight, options
        self._grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        self._grad_weight = torch.empty_like(weight, dtype=dtype) if needed[1] else None
        self._is_first = True
        self._works: list[Any] = []

    def add(self, grad: Tensor, start: int, stop: int) -> None:
        """Add the gradients from the product's gradient of some rows.

        Collectives: starts an all-reduce of the gradient of ``x``.
        """
        if self._grad_x is not None:
            mine = self._grad_x[start:stop]
            torch.mm(grad, self._weight, out=mine)
            if self._options.group.size > 1:
                # Not waited for until the last chunk: it runs beside the products of the next one.
                layer = self._options.layer or "the head and loss"
                self._works.append(start_all_reduce_(mine, self._options.group, layer=layer))
        if self._grad_weight is not None:
            total, part = self._grad_weight, self._x[start:stop]
            if total.dtype == grad.dtype:
                # With beta=0 torch ignores the old values, so the buffer needs no zeros.
                torch.addmm(total, grad.t(), part, beta=0 if self._is_first else 1, out=total)
            elif self._is_first:
                total.copy_(grad.t().mm(part))
            else:
                total.add_(grad.t().mm(part))
        self._is_first = False

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Wait for the sum of the gradient of ``x`` over the ranks, and return both gradients."""
        for work in self._works:
            work.wait()
        return self._grad_x, self._grad_weight


# -- Fused losses over chunks of rows -------------------------------------------------------------


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Head(Protocol):
    """A head: it computes logits from features, and sums the gradients of its inputs over chunks."""

    def logits(self, start: int, stop: int, rows: Rows) -> Tensor:
        """Return the logits of some rows, of shape (rows, local classes), in a buffer of their own."""

    def add(self, grad: Tensor, start: int, stop: int, rows: Rows) -> None:
        """Add the gradients from the gradient of some rows' logits, which may be overwritten.

        Collectives: starts an all-reduce of the features' gradient.
        """

    def gradients(self) -> Gradients:
        """Return the gradients of features, weight and bias, ``None`` for one that is not needed."""


MakeHead = Callable[[Tensor, Tensor, Tensor | None, LossOptions, tuple[bool, ...]], Head]
"""What makes a head: from features, weight, bias, options, and which of the three need a gradient."""


def fused_cross_entropy(
    make: MakeHead,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return the loss of a head's logits.

    Forward: for each chunk an all-gather of 3 or 4 numbers per row. If gradients are needed, also an
    all-reduce of the features' gradient, which overlaps the computation of the next chunk. Backward: nothing.
    With reduction "none" and for float16 the logits are computed again. Forward: one all-gather. Backward: an
    all-reduce for each chunk.

    Args:
        make: The class of the head.
        x: Features of shape (rows, in), the same on all ranks.
        weight: This rank's shard, of shape (local classes, in).
        bias: This rank's shard, of shape (local classes,).
        target: Classes of shape (rows,), the same on all ranks.
        options: The options of the loss.
        chunk_rows: The number of rows of logits in memory at a time.
    """
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    # float16 gradients need the loss scale when they are computed; in the forward pass it is not known yet,
    # and small ones would become 0 (`small_float16_gradients_survive_under_a_loss_scale`).
    is_known = options.reduction != "none" and x.dtype != torch.float16
    function = _AtOnce if needed and is_known else _Twice
    return apply(function, x, weight, bias, make, target, options, chunk_rows)


class _AtOnce(torch.autograd.Function):
    """A fused loss with gradients from the forward pass, while a chunk's logits exist; backward scales them.

    Forward: an all-gather and an all-reduce for each chunk. Backward: nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        make: MakeHead,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        one = torch.ones((), dtype=dtype, device=x.device)
        row_grad = per_row(one, rows.valid, denominator, dtype)
        head = make(x, weight, bias, options, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=dtype, device=x.device)

        def softmax(chunk: _Chunk) -> tuple[Merged, Tensor | None]:
            logits, part = chunk.logits, chunk.rows
            spent = logits.dtype == dtype
            found = measure(logits, part, options, dtype, logits if spent else None)
            merged = merge(exchange(found, part, options), part, options)
            total.add_(merged.loss.sum())
            return merged, found[:, 0] if spent else None

        ctx.grads = _gradients(head, rows, row_grad, softmax, options, chunk_rows)
        ctx.likes = _likes(x, weight, bias)
        ctx.options = options
        loss = total / denominator if denominator is not None else total
        return loss.to(returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError(
                SECOND_BACKWARD.format("its gradients were given to the first", 'use reduction="none"')
            )
        grads, ctx.grads = ctx.grads, None
        # Reading a value of an accelerator would wait for it.
        if grad.device.type != "cpu" or float(grad) != 1.0:
            for g in grads:
                if g is not None:
                    g.mul_(grad)
        return (*_placed(grads, ctx.likes, ctx.options), None, None, None, None)


class _Twice(torch.autograd.Function):
    """A fused loss that computes each chunk's logits in both passes, for gradients that differ by row.

    Forward: one all-gather. Backward: an all-reduce for each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        make: MakeHead,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        found = torch.empty(x.size(0), options.columns, dtype=dtype, device=x.device)
        head = make(x, weight, bias, options, (False, False, False))
        for a, b in _chunks(x.size(0), chunk_rows) if x.size(0) else ():
            part = rows.part(a, b)
            logits = head.logits(a, b, part)
            found[a:b] = measure(logits, part, options, dtype, logits if logits.dtype == dtype else None)
            del logits  # or two chunks would exist at once: `no_more_than_a_chunk_of_logits_exists`
        merged = merge(exchange(found, rows, options), rows, options)
        ctx.make, ctx.options, ctx.chunk_rows, ctx.dtype = make, options, chunk_rows, dtype
        ctx.save_for_backward(
            x, weight, bias, target, merged.lse, merged.softmax_factor, merged.target_factor
        )
        return reduce_rows(merged.loss, rows.factor, options.reduction).to(returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, target, lse, softmax_factor, target_factor = ctx.saved_tensors
        rows = Rows(target, ctx.options, ctx.dtype)
        denominator = rows.factor.sum() if ctx.options.reduction == "mean" else None
        row_grad = per_row(grad, rows.valid, denominator, ctx.dtype)
        head = ctx.make(x, weight, bias, ctx.options, ctx.needs_input_grad[:3])

        def softmax(chunk: _Chunk) -> tuple[Merged, None]:
            at = chunk.at
            return Merged(lse[at], lse[at], softmax_factor[at], target_factor[at]), None

        grads = _gradients(head, rows, row_grad, softmax, ctx.options, ctx.chunk_rows)
        placed = _placed(grads, _likes(x, weight, bias), ctx.options)
        return (*placed, None, None, None, None)


class _Chunk(NamedTuple):
    """A chunk of rows with its logits."""

    at: slice
    rows: Rows
    logits: Tensor


def _chunks(rows: int, size: int) -> list[tuple[int, int]]:
    # One chunk at least, so that every rank takes part in the exchange and its check of the targets.
    return [(a, min(rows, a + size)) for a in range(0, max(rows, 1), size)]


def _likes(*tensors: Tensor | None) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if t is None else (t.shape, t.dtype) for t in tensors]


def _placed(
    grads: Gradients, likes: list[tuple[torch.Size, torch.dtype] | None], options: LossOptions
) -> list[Tensor | None]:
    """Cast the gradients to the types of their tensors, and give the weight's gradient its shape."""
    placed = [
        None if grad is None or like is None else grad.to(like[1])
        for grad, like in zip(grads, likes, strict=True)
    ]
    if placed[1] is not None and likes[1] is not None and options.sampled is not None:
        placed[1] = _of_all_classes(placed[1], options.sampled, likes[1][0], is_sparse=options.is_sparse)
    return placed


def _of_all_classes(grad: Tensor, sampled: Tensor, shape: torch.Size, *, is_sparse: bool) -> Tensor:
    """Return the gradient of all classes, from the gradient of the sampled ones."""
    if is_sparse:
        # Sampled indices are sorted and distinct: they are coalesced, and need no check.
        index = sampled.unsqueeze(0)
        return torch.sparse_coo_tensor(index, grad, shape, is_coalesced=True, check_invariants=False)
    return grad.new_zeros(shape).index_copy_(0, sampled, grad)


def _gradients(
    head: Head,
    rows: Rows,
    row_grad: Tensor,
    softmax: Callable[[_Chunk], tuple[Merged, Tensor | None]],
    options: LossOptions,
    chunk_rows: int,
) -> Gradients:
    """Compute the head's gradients chunk by chunk; each chunk's logits are overwritten by their gradient.

    Args:
        head: The head.
        rows: All rows.
        row_grad: The gradient of each row's loss, of shape (rows,).
        softmax: A function that returns the softmax's factors for a chunk. If `measure` has replaced the
            logits by exponentials, it also returns their maxima.
        options: The options of the loss.
        chunk_rows: The number of rows of logits in memory at a time.

    Collectives: those of ``softmax`` and of `Head.add`, for each chunk.
    """
    for a, b in _chunks(row_grad.size(0), chunk_rows):
        part = rows.part(a, b)
        chunk = _Chunk(slice(a, b), part, head.logits(a, b, part))
        merged, maximum = softmax(chunk)
        fill_gradient(
            chunk.logits,
            chunk.logits,
            maximum,
            (merged.lse, merged.softmax_factor, merged.target_factor),
            (part.index, part.mine),
            row_grad[chunk.at],
            options,
        )
        head.add(chunk.logits, a, b, part)
        del chunk  # as above, before the next chunk's logits are computed
    return head.gradients()
