"""Losses of a head over class shards, of whose logits a chunk of rows exists at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tp_shard._groups._collectives import apply, start_all_reduce_
from tp_shard.nn._loss._cross_entropy import SECOND_BACKWARD
from tp_shard.nn._loss._softmax import (
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

# -- The head of a fused loss whose logits are ``x @ weight.T + bias`` ----------------------------


class LinearKind:
    """A head without settings."""

    def open(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> "LinearHead":
        """Return the head over these tensors."""
        return LinearHead(x, weight, bias, options, needed)

    def place(self, grad: Tensor, shape: torch.Size, options: LossOptions) -> Tensor:  # noqa: ARG002 - the protocol's
        """Return the weight's gradient as it is."""
        return grad


class LinearHead:
    """Logits of a linear layer.

    Args:
        x: Of shape (rows, in).
        weight: Of shape (local classes, in).
        bias: Of shape (local classes,).
        options: Who communicates.
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
        """Add what the gradient of some rows' logits gives.

        Collectives: begins an all-reduce of the features' gradient.
        """
        self._products.add(grad, start, stop)
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0, dtype=self._grad_bias.dtype))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are needed."""
        return (*self._products.wait(), self._grad_bias)


class Products:
    """The gradients of the two factors of ``x @ weight.T``, summed up over chunks of rows."""

    def __init__(self, x: Tensor, weight: Tensor, options: LossOptions, needed: tuple[bool, ...]) -> None:
        dtype = computed_in(weight.dtype)
        self._x, self._weight, self._options = x, weight, options
        self._grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needed[0] else None
        self._grad_weight = torch.empty_like(weight, dtype=dtype) if needed[1] else None
        self._is_first = True
        self._works: list[Any] = []

    def add(self, grad: Tensor, start: int, stop: int) -> None:
        """Add what the product's gradient of some rows gives.

        Collectives: begins an all-reduce of the gradient of ``x``.
        """
        if self._grad_x is not None:
            mine = self._grad_x[start:stop]
            torch.mm(grad, self._weight, out=mine)
            if self._options.group.size > 1:
                layer = self._options.layer or "the head and loss"
                self._works.append(start_all_reduce_(mine, self._options.group, layer=layer))
        if self._grad_weight is not None:
            total, part = self._grad_weight, self._x[start:stop]
            if total.dtype == grad.dtype:
                # A factor of 0 leaves out what is there: nothing has to be filled with zeros first.
                torch.addmm(total, grad.t(), part, beta=0 if self._is_first else 1, out=total)
            elif self._is_first:
                total.copy_(grad.t().mm(part))
            else:
                total.add_(grad.t().mm(part))
        self._is_first = False

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients, after the ranks have summed that of ``x``."""
        for work in self._works:
            work.wait()
        return self._grad_x, self._grad_weight


# -- Losses of a head over class shards, of whose logits a chunk of rows exists at a time ---------


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Head(Protocol):
    """What makes logits out of features, and sums up the gradients of what it makes them of."""

    def logits(self, start: int, stop: int, rows: Rows) -> Tensor:
        """Return the logits of some rows, of shape (rows, local classes), in a buffer of their own."""

    def add(self, grad: Tensor, start: int, stop: int, rows: Rows) -> None:
        """Add what the gradient of some rows' logits gives; it may be overwritten.

        Collectives: begins an all-reduce of the features' gradient.
        """

    def gradients(self) -> Gradients:
        """Return the gradients of features, weight and bias, ``None`` where one is not needed."""


class HeadKind(Protocol):
    """Which head it is, with its settings."""

    def open(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> Head:
        """Return the head over these tensors."""

    def place(self, grad: Tensor, shape: torch.Size, options: LossOptions) -> Tensor:
        """Return the weight's gradient out of that of the classes which have logits."""


def fused_cross_entropy(
    kind: HeadKind,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return the loss of a head's logits.

    Forward: an all-gather of 3 or 4 numbers per row for each chunk, and where gradients are needed
    an all-reduce of the features' gradient, chunk by chunk, beside the computation of the next.
    Backward: nothing; with reduction "none" and for float16 the logits are computed again, the all-gather
    is one and the all-reduce happens here.

    Args:
        kind: The head.
        x: Features of shape (rows, in), the same on all ranks.
        weight: Of shape (local classes, in).
        bias: Of shape (local classes,).
        target: Of shape (rows,), the same on all ranks.
        options: What is computed.
        chunk_rows: How many rows of logits exist at a time.
    """
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    # A loss scale has to be in float16 gradients when they are computed: small ones would be 0 before it.
    is_known = options.reduction != "none" and x.dtype != torch.float16
    function = _AtOnce if needed and is_known else _Twice
    return apply(function, x, weight, bias, kind, target, options, chunk_rows)


class _AtOnce(torch.autograd.Function):
    """Computes gradients in the forward pass, while a chunk's logits are there; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: HeadKind,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        one = torch.ones((), dtype=dtype, device=x.device)
        row_grad = per_row(one, rows.valid, denominator, dtype)
        head = kind.open(x, weight, bias, options, ctx.needs_input_grad[:3])
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
        ctx.kind, ctx.options = kind, options
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
        if grad.device.type != "cpu" or float(grad) != 1.0:  # asking a device would wait for it
            for g in grads:
                if g is not None:
                    g.mul_(grad)
        return (*_placed(grads, ctx.likes, ctx.kind, ctx.options), None, None, None, None)


class _Twice(torch.autograd.Function):
    """Computes each chunk's logits in both passes: what the loss's gradient is counts for each element."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: HeadKind,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = Rows(target, options, dtype)
        found = torch.empty(x.size(0), options.columns, dtype=dtype, device=x.device)
        head = kind.open(x, weight, bias, options, (False, False, False))
        for a, b in _chunks(x.size(0), chunk_rows) if x.size(0) else ():
            part = rows.part(a, b)
            logits = head.logits(a, b, part)
            found[a:b] = measure(logits, part, options, dtype, logits if logits.dtype == dtype else None)
            del logits  # before the next chunk's are made
        merged = merge(exchange(found, rows, options), rows, options)
        ctx.kind, ctx.options, ctx.chunk_rows, ctx.dtype = kind, options, chunk_rows, dtype
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
        head = ctx.kind.open(x, weight, bias, ctx.options, ctx.needs_input_grad[:3])

        def softmax(chunk: _Chunk) -> tuple[Merged, None]:
            at = chunk.at
            return Merged(lse[at], lse[at], softmax_factor[at], target_factor[at]), None

        grads = _gradients(head, rows, row_grad, softmax, ctx.options, ctx.chunk_rows)
        placed = _placed(grads, _likes(x, weight, bias), ctx.kind, ctx.options)
        return (*placed, None, None, None, None)


class _Chunk(NamedTuple):
    """Rows whose logits are there."""

    at: slice
    rows: Rows
    logits: Tensor


def _chunks(rows: int, size: int) -> list[tuple[int, int]]:
    # One chunk at least: the ranks check their targets with it.
    return [(a, min(rows, a + size)) for a in range(0, max(rows, 1), size)]


def _likes(*tensors: Tensor | None) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if t is None else (t.shape, t.dtype) for t in tensors]


def _placed(
    grads: Gradients,
    likes: list[tuple[torch.Size, torch.dtype] | None],
    kind: HeadKind,
    options: LossOptions,
) -> list[Tensor | None]:
    """Return the gradients in the types, and that of the weight in the shape, of what they are of."""
    placed: list[Tensor | None] = []
    for i, (grad, like) in enumerate(zip(grads, likes, strict=True)):
        if grad is None or like is None:
            placed.append(None)
        else:
            cast = grad.to(like[1])
            placed.append(kind.place(cast, like[0], options) if i == 1 else cast)
    return placed


def _gradients(
    head: Head,
    rows: Rows,
    row_grad: Tensor,
    softmax: Callable[[_Chunk], tuple[Merged, Tensor | None]],
    options: LossOptions,
    chunk_rows: int,
) -> Gradients:
    """Return the head's gradients, made chunk by chunk out of logits that become their own gradient.

    Args:
        head: Makes the logits.
        rows: All rows.
        row_grad: The gradient of each row's loss, of shape (rows,).
        softmax: Returns what makes a softmax out of a chunk's logits, and their largest ones where `measure`
            has left exponentials in their place.
        options: What is computed.
        chunk_rows: How many rows of logits exist at a time.

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
        del chunk  # before the next one's logits are made
    return head.gradients()
