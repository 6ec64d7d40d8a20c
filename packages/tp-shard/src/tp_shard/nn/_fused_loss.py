"""Losses that are fused with their head: logits exist for a chunk of rows at a time, never all at once."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tp_shard._groups._collectives import apply, start_all_reduce_
from tp_shard.nn._class_shards import (
    LossOptions,
    Merged,
    TargetRows,
    computed_in,
    exchange,
    fill_gradient,
    mean_denominator,
    merge,
    per_row,
    reduce_rows,
    refuse_second_backward,
    returned_in,
    row_statistics,
)

# -- The linear head: logits ``x @ weight.T + bias`` ----------------------------------------------


class LinearHead:
    """A linear head over class shards: features (rows, in), weight (local classes, in), bias."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: LossOptions,
        needed: tuple[bool, ...],
    ) -> None:
        self._x = x
        self._weight = weight
        self._bias = bias
        self._products = Products(x, weight, options, needed)
        self._grad_bias: Tensor | None = None
        if bias is not None and needed[2]:
            self._grad_bias = torch.zeros_like(bias, dtype=computed_in(weight.dtype))

    def logits(self, start: int, stop: int, rows: TargetRows) -> Tensor:  # noqa: ARG002 - the protocol's
        x = self._x[start:stop]  # (rows, in) @ (in, local classes)
        if self._bias is None:
            return x.mm(self._weight.t())
        return torch.addmm(self._bias, x, self._weight.t())

    def add(self, grad: Tensor, start: int, stop: int, rows: TargetRows) -> None:  # noqa: ARG002 - as above
        """Add the gradients from the gradient of some rows' logits.

        Collectives: starts an all-reduce of the features' gradient.
        """
        self._products.add(grad, start, stop)
        if self._grad_bias is not None:
            self._grad_bias.add_(grad.sum(0, dtype=self._grad_bias.dtype))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (*self._products.wait(), self._grad_bias)


class Products:
    """The gradients of the two factors of ``x @ weight.T``, summed over chunks of rows."""

    def __init__(self, x: Tensor, weight: Tensor, options: LossOptions, needed: tuple[bool, ...]) -> None:
        self._x = x
        self._weight = weight
        self._options = options
        self._grad_x: Tensor | None = None
        if needed[0]:
            self._grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._grad_weight: Tensor | None = None
        if needed[1]:
            self._grad_weight = torch.empty_like(weight, dtype=computed_in(weight.dtype))
        self._is_first = True
        self._works: list[Any] = []  # all-reduces of parts of the gradient of `x`

    def add(self, grad: Tensor, start: int, stop: int) -> None:
        """Add the gradients from the product's gradient of some rows.

        Collectives: starts an all-reduce of the gradient of ``x``.
        """
        if self._grad_x is not None:
            grad_x = self._grad_x[start:stop]  # (rows, local classes) @ (local classes, in)
            torch.mm(grad, self._weight, out=grad_x)
            if self._options.group.size > 1:
                # Not waited for until the last chunk: it runs beside the products of the next one.
                layer = self._options.layer or "the head and loss"
                self._works.append(start_all_reduce_(grad_x, self._options.group, layer=layer))
        if self._grad_weight is not None:
            total = self._grad_weight
            part = self._x[start:stop]  # (local classes, rows) @ (rows, in)
            if total.dtype == grad.dtype:
                # With beta=0 torch ignores the old values, so the buffer needs no zeros.
                beta = 0 if self._is_first else 1
                torch.addmm(total, grad.t(), part, beta=beta, out=total)
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

    def logits(self, start: int, stop: int, rows: TargetRows) -> Tensor:
        """Return the logits of some rows, of shape (rows, local classes), in a buffer of their own."""

    def add(self, grad: Tensor, start: int, stop: int, rows: TargetRows) -> None:
        """Add the gradients from the gradient of some rows' logits, which may be overwritten.

        Collectives: starts an all-reduce of the features' gradient.
        """

    def gradients(self) -> Gradients:
        """Return the gradients of features, weight and bias, ``None`` for one that is not needed."""


MakeHead = Callable[[Tensor, Tensor, Tensor | None, LossOptions, tuple[bool, ...]], Head]
"""What makes a head: from features, weight, bias, options, and which of the three need a gradient."""


def fused_cross_entropy(
    make_head: MakeHead,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossOptions,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return the loss of a head's logits, with ``chunk_rows`` rows of them in memory at a time.

    Forward: for each chunk an all-gather of 3 or 4 numbers per row. If gradients are needed, also an
    all-reduce of the features' gradient, which overlaps the computation of the next chunk. Backward: nothing.
    With reduction "none" and for float16 the logits are computed again. Forward: one all-gather. Backward: an
    all-reduce for each chunk.
    """
    has_inputs_with_grad = any(t is not None and t.requires_grad for t in (x, weight, bias))
    # float16 gradients need the loss scale when they are computed; in the forward pass it is not known yet,
    # and small ones would become 0 (`small_float16_gradients_survive_under_a_loss_scale`).
    is_scale_known = options.reduction != "none" and x.dtype != torch.float16
    function: type[torch.autograd.Function] = _RecomputeInBackward
    if torch.is_grad_enabled() and has_inputs_with_grad and is_scale_known:
        function = _GradientInForward
    return apply(function, x, weight, bias, make_head, target, options, chunk_rows)


class _GradientInForward(torch.autograd.Function):
    """A fused loss with gradients from the forward pass, while a chunk's logits exist; backward scales them.

    Forward: an all-gather and an all-reduce for each chunk. Backward: nothing.
    Ranks hold: replicated, sharded -> replicated; gradient: replicated -> replicated, sharded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        make_head: MakeHead,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = TargetRows(target, options, dtype)
        denominator = mean_denominator(rows, options)
        one = torch.ones((), dtype=dtype, device=x.device)
        row_grad = per_row(one, rows.valid, denominator, dtype)
        head = make_head(x, weight, bias, options, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=dtype, device=x.device)

        def softmax(chunk: _Chunk) -> tuple[Merged, Tensor | None]:
            logits, part = chunk.logits, chunk.rows
            keep = logits if logits.dtype == dtype else None
            statistics = row_statistics(logits, part, options, dtype, keep)
            merged = merge(exchange(statistics, part, options), part, options)
            total.add_(merged.loss.sum())
            if keep is None:
                return merged, None
            return merged, statistics[:, 0]

        ctx.grads = _gradients(head, rows, row_grad, softmax, options, chunk_rows)
        ctx.input_specs = _specs_of(x, weight, bias)
        ctx.options = options
        loss = total
        if denominator is not None:
            loss = total / denominator
        return loss.to(returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.grads is None:
            refuse_second_backward("its gradients were freed", 'use reduction="none"')
        grads = ctx.grads
        ctx.grads = None
        # Reading a value of an accelerator would wait for it.
        if grad.device.type != "cpu" or float(grad) != 1.0:
            for g in grads:
                if g is not None:
                    g.mul_(grad)
        return (*_for_inputs(grads, ctx.input_specs, ctx.options), None, None, None, None)


class _RecomputeInBackward(torch.autograd.Function):
    """A fused loss that computes each chunk's logits in both passes, for gradients that differ by row.

    Forward: one all-gather. Backward: an all-reduce for each chunk.
    Ranks hold: replicated, sharded -> replicated; gradient: replicated -> replicated, sharded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        make_head: MakeHead,
        target: Tensor,
        options: LossOptions,
        chunk_rows: int,
    ) -> Tensor:
        dtype = computed_in(x.dtype)
        rows = TargetRows(target, options, dtype)
        statistics = torch.empty(x.size(0), options.n_statistics, dtype=dtype, device=x.device)
        head = make_head(x, weight, bias, options, (False, False, False))
        chunks = _chunks(x.size(0), chunk_rows) if x.size(0) else []
        for a, b in chunks:
            part = rows.part(a, b)
            logits = head.logits(a, b, part)
            keep = logits if logits.dtype == dtype else None
            statistics[a:b] = row_statistics(logits, part, options, dtype, keep)
            del logits, keep  # or two chunks would exist at once: `no_more_than_a_chunk_of_logits_exists`
        merged = merge(exchange(statistics, rows, options), rows, options)
        ctx.make_head = make_head
        ctx.options = options
        ctx.chunk_rows = chunk_rows
        ctx.dtype = dtype
        ctx.save_for_backward(
            x, weight, bias, target, merged.lse, merged.softmax_factor, merged.target_factor
        )
        return reduce_rows(merged.loss, rows.factor, options.reduction).to(returned_in(x, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, target, lse, softmax_factor, target_factor = ctx.saved_tensors
        rows = TargetRows(target, ctx.options, ctx.dtype)
        row_grad = per_row(grad, rows.valid, mean_denominator(rows, ctx.options), ctx.dtype)
        head = ctx.make_head(x, weight, bias, ctx.options, ctx.needs_input_grad[:3])

        def softmax(chunk: _Chunk) -> tuple[Merged, None]:
            at = chunk.at
            # The loss itself is not needed any more; `lse` stands in its place.
            return Merged(lse[at], lse[at], softmax_factor[at], target_factor[at]), None

        grads = _gradients(head, rows, row_grad, softmax, ctx.options, ctx.chunk_rows)
        input_grads = _for_inputs(grads, _specs_of(x, weight, bias), ctx.options)
        return (*input_grads, None, None, None, None)


class _Chunk(NamedTuple):
    """A chunk of rows with its logits."""

    at: slice
    rows: TargetRows
    logits: Tensor


def _chunks(rows: int, size: int) -> list[tuple[int, int]]:
    # One chunk at least, so that every rank takes part in the exchange and its check of the targets.
    return [(a, min(rows, a + size)) for a in range(0, max(rows, 1), size)]


class _Spec(NamedTuple):
    """What is left of an input for its gradient, once the input itself may be freed."""

    shape: torch.Size
    dtype: torch.dtype


def _specs_of(*inputs: Tensor | None) -> list[_Spec | None]:
    specs: list[_Spec | None] = []
    for tensor in inputs:
        if tensor is None:
            spec = None
        else:
            spec = _Spec(tensor.shape, tensor.dtype)
        specs.append(spec)
    return specs


def _for_inputs(grads: Gradients, specs: list[_Spec | None], options: LossOptions) -> list[Tensor | None]:
    """Cast the gradients of features, weight and bias to the inputs' types; scatter a sampled weight's."""
    grad_inputs: list[Tensor | None] = []
    for grad, spec in zip(grads, specs, strict=True):
        if grad is None or spec is None:
            grad_inputs.append(None)
        else:
            grad_inputs.append(grad.to(spec.dtype))
    grad_weight, weight_spec = grad_inputs[1], specs[1]
    if grad_weight is not None and weight_spec is not None and options.sampled is not None:
        grad_inputs[1] = _scatter_to_all_classes(
            grad_weight, options.sampled, weight_spec.shape, is_sparse=options.is_sparse
        )
    return grad_inputs


def _scatter_to_all_classes(grad: Tensor, sampled: Tensor, shape: torch.Size, *, is_sparse: bool) -> Tensor:
    """Return the gradient of all classes, from the gradient of the sampled ones."""
    if is_sparse:
        # Sampled indices are sorted and distinct: they are coalesced, and need no check.
        index = sampled.unsqueeze(0)
        return torch.sparse_coo_tensor(index, grad, shape, is_coalesced=True, check_invariants=False)
    return grad.new_zeros(shape).index_copy_(0, sampled, grad)


def _gradients(
    head: Head,
    rows: TargetRows,
    row_grad: Tensor,
    softmax: Callable[[_Chunk], tuple[Merged, Tensor | None]],
    options: LossOptions,
    chunk_rows: int,
) -> Gradients:
    """Compute the head's gradients chunk by chunk; each chunk's logits are overwritten by their gradient.

    ``row_grad`` is the gradient of each row's loss. ``softmax`` returns the softmax's factors for a chunk,
    and the maxima if `row_statistics` has replaced the logits by exponentials.

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
            (part.index, part.is_local),
            row_grad[chunk.at],
            options,
        )
        head.add(chunk.logits, a, b, part)
        del chunk  # as above, before the next chunk's logits are computed
    return head.gradients()
