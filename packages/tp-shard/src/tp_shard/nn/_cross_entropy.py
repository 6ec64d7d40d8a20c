"""Cross entropy over classes that are split over ranks: of logits, or of a head, chunk by chunk.

The hidden values (batch, features) are on every rank of the group, and each rank has rows of the class
matrix. Its product gives logits (batch, classes / ranks). Each rank takes its largest logit, its sum of
exponentials, and the target's logit if it has it. Forward exchanges these once per row, never logits, so
that the loss (batch,) is the same on every rank. Backward is softmax - target, from what forward kept,
without a collective. The layer before sums the gradient of the hidden values over the group. Fused with
the product, in chunks, the logits of all classes never exist at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, DisagreementError

from tp_shard._groups import _debug
from tp_shard._groups._collectives import all_gather_flat, apply, as_output, start_all_reduce_
from tp_shard._groups._group import ALONE, Group, GroupLike, as_group
from tp_shard._shards import get_parallel_dim, get_parallel_size
from tp_shard._split import bounds, shard_sizes
from tp_shard.errors import OutOfRangeError
from tp_shard.nn._split_products import autocast

# -- Options of a loss, and the targets as one rank sees them -------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LossOptions:
    """The options of a loss over class shards.

    Attributes:
        weight: A factor for each class, of shape (num_classes,), in the type of the computation.
        z_loss: The factor of the squared logarithm of the softmax's denominator.
        group: The ranks that hold the logits together.
        layer: The layer that communicates, for messages.
        sampled: The classes of this rank with logits, as sorted indices into its shard; ``None`` for all of
            them. It contains each target that is a class of this rank.
        num_sampled: The number of classes with logits over all ranks; used with ``sampled`` and label
            smoothing.
        is_sparse: Whether the gradient of the weight is a sparse tensor of the sampled classes.
    """

    num_classes: int
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    z_loss: float
    group: Group
    layer: Any
    sampled: Tensor | None = None
    num_sampled: int = 0
    is_sparse: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The first class of this rank, and the one after its last."""
        return bounds(self.num_classes, self.group.size, self.group.rank)

    @property
    def local_weight(self) -> Tensor | None:
        """The factors of this rank's classes."""
        start, stop = self.bounds
        return None if self.weight is None else self.weight[start:stop]

    @property
    def spread(self) -> float:
        """The part of a target that goes to each class with a logit."""
        if self.label_smoothing == 0:
            return 0.0
        classes = self.num_classes if self.sampled is None else self.num_sampled
        return self.label_smoothing / classes

    @property
    def columns(self) -> int:
        """The number of values per row that the ranks exchange."""
        return 4 if self.label_smoothing > 0 else 3


class TargetRows:
    """The targets of some rows, as one rank sees them. All tensors have shape (rows,).

    Attributes:
        target: The classes.
        valid: Whether the row counts.
        mine: Whether the target is a class of this rank.
        index: The target's place among this rank's logits, 0 for targets of other ranks.
        factor: The weight of the target's class, 0 for rows that do not count.
    """

    __slots__ = ("factor", "index", "mine", "target", "valid")

    def __init__(self, target: Tensor, options: LossOptions, dtype: torch.dtype) -> None:
        start, stop = options.bounds
        self.target = target
        self.valid = target != options.ignore_index
        self.mine = self.valid & (target >= start) & (target < stop)
        index = target - start
        if options.sampled is not None:
            index = torch.searchsorted(options.sampled, index)
        self.index = torch.where(self.mine, index, 0)
        if options.weight is None:
            self.factor = self.valid.to(dtype)
        else:
            safe = torch.where(self.valid, target, 0).clamp_(0, options.num_classes - 1)
            self.factor = torch.where(self.valid, options.weight[safe], 0)

    def part(self, start: int, stop: int) -> "TargetRows":
        rows = TargetRows.__new__(TargetRows)
        for name in self.__slots__:
            setattr(rows, name, getattr(self, name)[start:stop])
        return rows


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a loss of logits of ``dtype`` is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def returned_in(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the loss: the type of the logits, as in torch's loss; under autocast ``dtype``."""
    return dtype if torch.is_autocast_enabled(logits.device.type) else logits.dtype


# -- The one exchange of a loss, which includes the check of the targets --------------------------


_HEADER = 3  # values before the rows: a wrong target or 0, the number of classes, a checksum of the targets
_EXACT = 1 << 23  # float32 represents integers below it exactly
_OUT_OF_RANGE = float(1 << 24)


def exchange(found: Tensor, rows: TargetRows, options: LossOptions) -> Tensor:
    """Return the values of all ranks, of shape (ranks, rows, columns).

    Each rank checks its targets first and sends the result of the check along. So a wrong target raises on
    all ranks, where a rank that raised alone would leave the others waiting.

    Raises:
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled code
            torch asserts instead.

    Collectives: one all-gather; none on one rank.
    """
    group = options.group
    # Reading values would wait for an accelerator and break a compiled graph in two.
    has_values = not hasattr(found, "fake_mode")
    can_ask = found.device.type == "cpu" and has_values and not torch.compiler.is_compiling()
    header = _check_targets(rows, options) if can_ask else [0.0] * _HEADER
    if not can_ask:
        wrong = rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))
        # Private: torch has no public assertion that does not wait for the device. The test
        # `a_wrong_target_is_an_error_in_the_graph_too` notices its loss.
        torch._assert_async(~wrong.any(), "a target is none of the classes")  # type: ignore[no-untyped-call,unused-ignore]  # torch leaves it so
    if group.size == 1:
        _refuse_wrong([header], options)
        return found.unsqueeze(0)
    if _debug.state.enabled:
        _debug.check("all_gather", found, group, options.layer or "the loss")
    mine = torch.cat([found.new_tensor(header), found.view(-1)])
    everyones = mine.new_empty(group.size, mine.numel())
    all_gather_flat(everyones, mine, group)
    if can_ask:
        _refuse_wrong(everyones[:, :_HEADER].tolist(), options)
    return everyones[:, _HEADER:].view(group.size, *found.shape)


def _check_targets(rows: TargetRows, options: LossOptions) -> list[float]:
    wrong = 0.0
    if rows.target.numel():
        low, high = (int(t) for t in torch.aminmax(rows.target))
        if low < 0 or high >= options.num_classes:
            bad = rows.target[rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))]
            if bad.numel():
                wrong = max(-_OUT_OF_RANGE, min(_OUT_OF_RANGE, float(bad[0]) * 2 + 1))
    places = torch.arange(1, rows.target.numel() + 1)  # factors, so that the checksum depends on the order
    total = float(int(rows.target.dot(places)) % _EXACT)
    return [wrong, float(options.num_classes % _EXACT), total]


def _refuse_wrong(headers: list[list[float]], options: LossOptions) -> None:
    classes = [int(h[1]) for h in headers]
    if len(set(classes)) > 1:
        msg = (
            f"ranks count different numbers of classes: {classes}, by rank; where class shards are uneven, "
            "or the mark that carries their number was lost, say num_classes="
        )
        raise DisagreementError(msg)
    for rank, (wrong, _, _) in enumerate(headers):
        if wrong:
            target = f"target {int((wrong - 1) / 2)}" if abs(wrong) < _OUT_OF_RANGE else "a target"
            msg = (
                f"{target} on rank {rank} is not one of {options.num_classes} classes, 0 to "
                f"{options.num_classes - 1}, nor ignore_index={options.ignore_index}"
            )
            raise OutOfRangeError(msg)
    sums = [h[2] for h in headers]
    if len(set(sums)) > 1:
        msg = (
            "ranks that hold the classes together have different targets; each of them needs the same "
            "rows: gather the batch and its targets first (ts.distributed.gather_batch)"
        )
        raise DisagreementError(msg)


# -- The values of each rank, and their merge -----------------------------------------------------
# After the vocabulary-parallel loss of Megatron-LM (Shoeybi et al., "Megatron-LM: Training Multi-Billion
# Parameter Language Models Using Model Parallelism", arXiv:1909.08053): logits stay on their rank, and the
# ranks exchange a few values per row. Here in one exchange, as in an online softmax: each rank sends its own
# maximum and its sum of exponentials relative to that maximum.


_CPU_BLOCK = 1 << 17  # elements: half a megabyte in float32 stays in a core's cache
_DEVICE_BLOCK = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The merged values of all ranks, one number per row.

    Attributes:
        lse: The logarithm of the softmax's denominator.
        loss: The loss before reduction.
        softmax_factor: The factor of the softmax in the loss's gradient.
        target_factor: The number that is subtracted from it at the target.
    """

    lse: Tensor
    loss: Tensor
    softmax_factor: Tensor
    target_factor: Tensor


def block_rows(width: int, device: torch.device) -> int:
    """Return the number of rows of logits or centers to process in one block."""
    size = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    return max(1, size // max(1, width))


def measure(
    logits: Tensor, rows: TargetRows, options: LossOptions, dtype: torch.dtype, keep: Tensor | None
) -> Tensor:
    """Return what the ranks exchange, (rows, 3 or 4), of this rank's logits, (rows, local classes).

    It is the maximum, the sum of the exponentials below it, the target's logit or 0, and with label smoothing
    the weighted sum of the logits. ``keep`` gets ``exp(z - maximum)`` in ``dtype`` and may be ``logits``
    itself; it is ``None`` if the exponentials are not needed later.
    """
    n, classes = logits.shape
    found = torch.zeros(n, options.columns, dtype=dtype, device=logits.device)
    if classes == 0 or n == 0:
        found[:, 0] = float("-inf")
        return found
    weight = options.local_weight
    found[:, 2] = torch.where(rows.mine, logits.gather(1, rows.index.unsqueeze(1)).squeeze(1).to(dtype), 0)
    lowest = torch.finfo(dtype).min
    step = block_rows(classes, logits.device)
    parts = torch.split(logits, step)
    if keep is None:
        targets = (torch.empty(parts[0].shape, dtype=dtype, device=logits.device),) * len(parts)
    else:
        targets = torch.split(keep, step)
    columns = (torch.split(column, step) for column in torch.split(found, 1, 1))
    for block, target, maximum, total, _, *sums in zip(parts, targets, *columns, strict=True):
        exponentials = target if keep is not None else target[: block.size(0)]
        if block.dtype != dtype:
            block = exponentials.copy_(block)  # noqa: PLW2901 - the same numbers
        if sums:
            weighted = block.sum(-1, keepdim=True) if weight is None else (block @ weight).unsqueeze(1)
            sums[0].copy_(weighted)
        torch.amax(block, -1, keepdim=True, out=maximum)
        # A row with all classes excluded has the maximum -inf, and -inf minus -inf would be NaN.
        torch.sub(block, maximum.clamp_min(lowest), out=exponentials).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total)
    return found


def merge(everyones: Tensor, rows: TargetRows, options: LossOptions) -> Merged:
    """Merge the values of all ranks, of shape (ranks, rows, columns), by log-sum-exp."""
    maximum = everyones[..., 0].amax(0)
    below = (everyones[..., 0] - maximum).exp_()  # (ranks, rows)
    lse = (below * everyones[..., 1]).sum(0).log_().add_(maximum)
    smoothing = options.label_smoothing
    target_factor = rows.factor * (1 - smoothing)
    loss = target_factor * torch.where(rows.valid, lse - everyones[..., 2].sum(0), 0)
    softmax_factor = target_factor
    if smoothing > 0:
        spread = options.spread
        total = smoothing if options.weight is None else spread * options.weight.sum()
        terms = total * lse - spread * everyones[..., 3].sum(0)
        loss = loss + torch.where(rows.valid, terms, 0)
        softmax_factor = softmax_factor + total * rows.valid.to(loss.dtype)
    if options.z_loss:
        loss = loss + options.z_loss * torch.where(rows.valid, lse * lse, 0)
        softmax_factor = softmax_factor + torch.where(rows.valid, 2 * options.z_loss * lse, 0)
    return Merged(lse, loss, softmax_factor, target_factor)


def fill_gradient(
    out: Tensor,
    logits: Tensor,
    maximum: Tensor | None,
    merged: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    grad: Tensor,
    options: LossOptions,
) -> None:
    """Write the gradient of some rows of logits, (rows, local classes), to ``out``.

    ``out`` may be ``logits``. With ``maximum``, this rank's maximum of each row, ``logits`` are the
    exponentials that :func:`measure` kept. ``merged`` has ``lse``, ``softmax_factor`` and ``target_factor``
    of :class:`Merged`, and ``rows`` has ``index`` and ``mine`` of :class:`TargetRows`. ``grad`` is 0 for rows
    that do not count.
    """
    lse, softmax_factor, target_factor = merged
    index, mine = rows
    n, classes = logits.shape
    if n == 0 or classes == 0:
        return
    dtype = grad.dtype
    factor = softmax_factor * grad
    if maximum is not None:
        factor = factor * (maximum - lse).exp_()
    at_target = torch.where(mine, -target_factor * grad, 0).unsqueeze(1)
    weight = options.local_weight
    if maximum is not None and out.dtype == dtype and options.label_smoothing == 0:  # a single pass
        torch.mul(logits, factor.unsqueeze(1), out=out).scatter_add_(1, index.unsqueeze(1), at_target)
        return
    spread = (grad * options.spread).unsqueeze(1)
    scratch: Tensor | None = None
    step = block_rows(classes, logits.device)
    for a in range(0, n, step):
        b = min(n, a + step)
        target = out[a:b]
        if out.dtype != dtype:
            if scratch is None:
                scratch = torch.empty(target.shape, dtype=dtype, device=out.device)
            target = scratch[: b - a]
        rows_factor = factor[a:b].unsqueeze(1)
        if maximum is not None:
            torch.mul(logits[a:b], rows_factor, out=target)
        else:
            block = logits[a:b]
            if block.dtype != dtype:
                block = target.copy_(block)
            torch.sub(block, lse[a:b].unsqueeze(1), out=target).exp_().mul_(rows_factor)
        if options.label_smoothing > 0:
            if weight is None:
                target.sub_(spread[a:b])
            else:
                target.addcmul_(spread[a:b], weight.unsqueeze(0), value=-1)
        target.scatter_add_(1, index[a:b].unsqueeze(1), at_target[a:b])
        if target.dtype != out.dtype:
            out[a:b].copy_(target)


def reduce_rows(loss: Tensor, factor: Tensor, reduction: str) -> Tensor:
    """Reduce the loss of all rows: to their mean weighted by ``factor``, their sum, or not at all."""
    if reduction == "none":
        return loss
    return loss.sum() / factor.sum() if reduction == "mean" else loss.sum()


def per_row(grad: Tensor, valid: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the gradient of each row's loss, 0 for rows that do not count."""
    grad = grad.to(dtype)
    if denominator is not None:
        grad = grad / denominator
    return torch.where(valid, grad, 0)


# -- Cross entropy of logits with classes that are split over ranks -------------------------------


SECOND_BACKWARD = (
    "the loss goes backward a second time, and {}; compute it again, or {} where two backward "
    "passes are needed"
)


def cross_entropy(logits: Tensor, target: Tensor, options: LossOptions, *, inplace: bool) -> Tensor:
    """Return the loss of rows of logits, of shape (rows, local classes), which ``inplace`` overwrites.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.
    """
    if torch.compiler.is_compiling():
        return apply(_Compiled, logits, target, options)
    return apply(_CrossEntropy, logits, target, options, inplace)


def _saved(merged: Merged, rows: TargetRows, denominator: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return what both backward passes need beside the logits."""
    of_rows = rows.index, rows.mine, rows.valid
    return merged.lse, merged.softmax_factor, merged.target_factor, *of_rows, denominator


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
        rows = TargetRows(target, options, dtype)
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
        kept_logits = None if inplace else logits
        maximum = None if keep is None else found[:, 0].clone()
        ctx.save_for_backward(kept_logits, maximum, *_saved(merged, rows, denominator))
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
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
            maximum = None
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


class _Compiled(torch.autograd.Function):
    # Forward: an all-gather. Backward: nothing.
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
        dtype = computed_in(logits.dtype)
        rows = TargetRows(target, options, dtype)
        merged = merge(exchange(_measure(logits.to(dtype), rows, options), rows, options), rows, options)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        ctx.options, ctx.dtype = options, dtype
        ctx.save_for_backward(logits, *_saved(merged, rows, denominator))
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
            if weight is not None:
                spread = spread * weight
            out = out - spread
        if logits.size(1):
            at_target = torch.where(mine, -target_factor * row_grad, 0).unsqueeze(1)
            out = out.scatter_add(1, index.unsqueeze(1), at_target)
        return out.to(logits.dtype), None, None


def _measure(logits: Tensor, rows: TargetRows, options: LossOptions) -> Tensor:
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
        self._x, self._weight, self._bias = x, weight, bias
        self._products = Products(x, weight, options, needed)
        dtype = computed_in(weight.dtype)
        self._grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def logits(self, start: int, stop: int, rows: TargetRows) -> Tensor:  # noqa: ARG002 - the protocol's
        x = self._x[start:stop]
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
            total = self._grad_weight
            part = self._x[start:stop]
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
    make: MakeHead,
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
        rows = TargetRows(target, options, dtype)
        denominator = rows.factor.sum() if options.reduction == "mean" else None
        one = torch.ones((), dtype=dtype, device=x.device)
        row_grad = per_row(one, rows.valid, denominator, dtype)
        head = make(x, weight, bias, options, ctx.needs_input_grad[:3])
        total = torch.zeros((), dtype=dtype, device=x.device)

        def softmax(chunk: _Chunk) -> tuple[Merged, Tensor | None]:
            logits, part = chunk.logits, chunk.rows
            keep = logits if logits.dtype == dtype else None
            found = measure(logits, part, options, dtype, keep)
            merged = merge(exchange(found, part, options), part, options)
            total.add_(merged.loss.sum())
            maximum = None if keep is None else found[:, 0]
            return merged, maximum

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
        rows = TargetRows(target, options, dtype)
        found = torch.empty(x.size(0), options.columns, dtype=dtype, device=x.device)
        head = make(x, weight, bias, options, (False, False, False))
        chunks = _chunks(x.size(0), chunk_rows) if x.size(0) else []
        for a, b in chunks:
            part = rows.part(a, b)
            logits = head.logits(a, b, part)
            keep = logits if logits.dtype == dtype else None
            found[a:b] = measure(logits, part, options, dtype, keep)
            del logits, keep  # or two chunks would exist at once: `no_more_than_a_chunk_of_logits_exists`
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
        rows = TargetRows(target, ctx.options, ctx.dtype)
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
    rows: TargetRows
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
    placed: list[Tensor | None] = []
    for grad, like in zip(grads, likes, strict=True):
        placed.append(None if grad is None or like is None else grad.to(like[1]))
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
    rows: TargetRows,
    row_grad: Tensor,
    softmax: Callable[[_Chunk], tuple[Merged, Tensor | None]],
    options: LossOptions,
    chunk_rows: int,
) -> Gradients:
    """Compute the head's gradients chunk by chunk; each chunk's logits are overwritten by their gradient.

    ``row_grad`` is the gradient of each row's loss. ``softmax`` returns the softmax's factors for a chunk,
    and the maxima if `measure` has replaced the logits by exponentials.

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


# -- Arguments of a loss: their meaning, and their checks -----------------------------------------


_CHUNK = 1 << 24  # logits in memory at a time: 64 MiB in float32
_CHUNK_ROWS = 128  # with fewer rows per chunk, reading the whole weight for each chunk would dominate


def check_options(reduction: str, label_smoothing: float, z_loss: float) -> None:
    """Raise unless a loss can be computed with these options."""
    if reduction not in ("mean", "sum", "none"):
        msg = f"reduction is 'mean', 'sum' or 'none', got {reduction!r}"
        raise ConfigError(msg)
    if not 0.0 <= label_smoothing <= 1.0:
        msg = f"label_smoothing is between 0 and 1, got {label_smoothing!r}"
        raise ConfigError(msg)
    if not 0.0 <= z_loss < float("inf"):
        msg = f"z_loss is a factor of 0 or more, got {z_loss!r}"
        raise ConfigError(msg)


def check_class_indices(target: Tensor) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        msg = (
            f"targets are classes, as integers; got {target.dtype} of shape {tuple(target.shape)}. Class "
            "probabilities are not supported: use label_smoothing, or F.cross_entropy on whole logits"
        )
        raise ConfigError(msg)


def check_head(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    num_classes: int | None,
    ranks: Group,
) -> int:
    """Check the shapes of features, a head's shard and targets; return the number of classes in all."""
    if weight.dim() != 2 or input.dim() < 1 or input.size(-1) != weight.size(1):
        msg = (
            f"input (..., in) and weight (local classes, in) do not fit: got shapes {tuple(input.shape)} "
            f"and {tuple(weight.shape)}"
        )
        raise ConfigError(msg)
    if target.shape != input.shape[:-1]:
        msg = (
            f"targets have the input's shape without its last dimension, {tuple(input.shape[:-1])}, got "
            f"{tuple(target.shape)}"
        )
        raise ConfigError(msg)
    size = num_classes if num_classes is not None else get_parallel_size(weight)
    if size is None:
        size = weight.size(0) * ranks.size
    start, stop = bounds(size, ranks.size, ranks.rank)
    if weight.size(0) != stop - start:
        msg = (
            f"rank {ranks.rank} of {ranks.size} holds {stop - start} of {size} classes, got a weight of "
            f"shape {tuple(weight.shape)}"
        )
        raise ConfigError(msg)
    return size


def read_chunk_rows(chunk_rows: int | None, local_classes: int) -> int:
    """Return the number of rows of logits in memory at a time; ``None`` gives the default."""
    if chunk_rows is None:
        return max(_CHUNK_ROWS, _CHUNK // max(1, local_classes))
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        msg = f"chunk_rows is a number of rows, 1 or more, got {chunk_rows!r}"
        raise ConfigError(msg)
    return chunk_rows


def read_width(
    input: Tensor,
    target: Tensor,
    num_classes: int | None,
    parallel: bool | None,
    class_dim: int | None,
    ranks: Group,
) -> tuple[int, bool]:
    """Return the number of classes over all ranks, and whether the logits are split."""
    if num_classes is not None and (isinstance(num_classes, bool) or num_classes < 1):
        msg = f"num_classes is a number of classes, 1 or more, got {num_classes!r}"
        raise ConfigError(msg)
    dim = find_class_dim(input, target, class_dim, prefer_last=True)
    width = input.size(dim)
    marked = get_parallel_dim(input) in (1, -1)
    known = num_classes  # over all ranks
    if known is None and marked:
        known = get_parallel_size(input)
    if parallel is None:
        parallel = marked
        if num_classes is not None and ranks.size > 1:
            if num_classes == 1:
                msg = "whether logits of one class are split cannot be seen: say parallel=True or False"
                raise ConfigError(msg)
            # The classes may be in dim 1, as torch takes them, even if the last dimension would fit too.
            widths = {width, input.size(min(1, input.dim() - 1))} if class_dim is None else {width}
            start, stop = bounds(num_classes, ranks.size, ranks.rank)
            parallel = stop - start in widths and num_classes not in widths
            if not parallel and num_classes not in widths:
                msg = (
                    f"logits of shape {tuple(input.shape)} are neither {num_classes} classes wide nor "
                    f"{stop - start}, which is the shard of rank {ranks.rank} of {ranks.size}"
                )
                raise ConfigError(msg)
    if not parallel:
        if num_classes is None:
            num_classes = input.size(find_class_dim(input, target, class_dim, prefer_last=False))
        return num_classes, False
    if known is None:
        known = width * ranks.size
    return known, True


def check_unambiguous(target: Tensor, size: int, ranks: Group) -> None:
    """Raise on all ranks for shapes that any of them could read as two layouts."""
    # By the sizes of all shards, and not of this rank's: if one rank raised alone, the others would wait for
    # it.
    inner = set(target.shape[1:])
    if target.dim() > 1 and len(inner) == 1 and inner <= set(shard_sizes(size, ranks.size)):
        msg = (
            f"logits of {size} classes over {ranks.size} ranks with targets of shape {tuple(target.shape)} "
            "may have their classes in dim 1 or last; say class_dim=1 or class_dim=-1"
        )
        raise ConfigError(msg)


def find_class_dim(input: Tensor, target: Tensor, class_dim: int | None, *, prefer_last: bool) -> int:
    ndim = input.dim()
    if class_dim is not None:
        if class_dim not in (1, -1) or (ndim == 1 and class_dim == 1):
            msg = (
                f"class_dim is 1 or -1 and a dimension of the logits, got {class_dim!r} for {ndim} dimensions"
            )
            raise ConfigError(msg)
        return class_dim % ndim
    if ndim < 3:
        return ndim - 1
    last = input.shape[:-1] == target.shape
    second = input.shape[:1] + input.shape[2:] == target.shape
    if last and second:
        return ndim - 1 if prefer_last else 1
    return 1 if second else ndim - 1


def check_local_width(
    input: Tensor,
    dim: int,
    size: int,
    is_split: bool,
    ranks: Group,
) -> None:
    width = input.size(dim)
    start, stop = bounds(size, ranks.size, ranks.rank)
    expected = stop - start if is_split else size
    if width == expected:
        return
    whole = ""
    if width == size:
        whole = " (whole logits are not split, though an argument or a mark says so)"
    share = f"{size}"
    if is_split:
        share = f"rank {ranks.rank} of {ranks.size} holds {expected} of {size} classes"
    msg = (
        f"logits of shape {tuple(input.shape)} are {width} classes wide, expected {share}{whole}; say "
        f"parallel= and num_classes= as they are"
    )
    raise ConfigError(msg)


def read_options(options: LossOptions, input: Tensor) -> LossOptions:
    """Return the options with class weights in the type in which the loss of ``input`` is computed."""
    if not input.is_floating_point():
        msg = f"logits are floating point numbers, got {input.dtype}"
        raise ConfigError(msg)
    weight, size = options.weight, options.num_classes
    if weight is None:
        return options
    if weight.shape != (size,):
        msg = f"the weight has a factor for each of {size} classes, got shape {tuple(weight.shape)}"
        raise ConfigError(msg)
    return replace(options, weight=weight.detach().to(computed_in(input.dtype)))


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    num_classes: int | None = None,
    parallel: bool | None = None,
    class_dim: int | None = None,
    z_loss: float = 0.0,
    inplace: bool = False,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Return the cross entropy of logits with classes that are split over the ranks.

    It equals ``torch.nn.functional.cross_entropy`` of the whole logits, which no rank ever has. As in
    Megatron-LM (arXiv:1909.08053), the ranks exchange only a row's maximum, sum of exponentials and target
    logit. Half types are computed in float32.

    Without ``inplace`` its largest allocation is one buffer of the logits' size. The forward pass makes it,
    and it becomes the gradient of the logits; for half types it is the gradient alone.

    Collectives: forward an all-gather of 3 numbers per row, 4 with label smoothing; backward none. For whole
    logits there are none.

    Args:
        input: Logits of shape (..., local classes), or in torch's order (batch, local classes, d1, ...). If
            both readings are possible, whole logits are read in torch's order, and split ones need
            ``class_dim``.
        target: Classes, counted over all ranks, of the shape of ``input`` without its classes; the same on
            all ranks.
        weight: A factor for each class, of shape (num_classes,), on every rank in full.
        ignore_index: The target of rows that do not count.
        reduction: "mean" (over the weights of the targets, as torch does), "sum" or "none".
        label_smoothing: The part of a target that is spread over all classes, from 0 to 1.
        num_classes: The number of classes over all ranks. Logits of this width are whole; logits as wide as
            this rank's shard are split. Uneven shards need it, or a mark that carries it.
        parallel: Whether the logits are split. By default ``num_classes`` decides, else their mark (see
            :func:`~tp_shard.get_parallel_dim`); without either they are whole.
        class_dim: The dimension of the classes: 1 or -1. By default the target's shape decides.
        z_loss: A factor of ``logsumexp(logits) ** 2``, which is added to the loss of each row that counts, as
            in PaLM (arXiv:2204.02311).
        inplace: Whether to overwrite the logits, so that no buffer of their size is made. The caller loses
            them, and can run one backward pass. In compiled code the compiler manages buffers.
        group: The ranks; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape. It has the logits' type; under autocast it is
        float32.

    Raises:
        ConfigError: Shapes, options and marks contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled code
            torch asserts instead, as in torch's own loss.
        DisagreementError: Ranks differ in targets or numbers of classes; checked on the CPU alone.
        RuntimeError: A second backward pass with ``inplace``.

    Example:
        >>> head = ts.nn.ParallelLinear(16, 10, dim=-1)
        >>> loss = parallel_cross_entropy(head(torch.ones(4, 16)), torch.arange(4), num_classes=10)
    """
    check_options(reduction, label_smoothing, z_loss)
    ranks = as_group(group)
    check_class_indices(target)
    if input.dim() == 0:
        msg = "logits need a dimension of classes, got a scalar"
        raise ConfigError(msg)
    size, is_split = read_width(input, target, num_classes, parallel, class_dim, ranks)
    if class_dim is None and is_split:
        check_unambiguous(target, size, ranks)
    dim = find_class_dim(input, target, class_dim, prefer_last=is_split)
    check_local_width(input, dim, size, is_split, ranks)
    if input.shape[:dim] + input.shape[dim + 1 :] != target.shape:
        msg = (
            f"targets of shape {tuple(target.shape)} do not fit logits of shape {tuple(input.shape)} with "
            f"their classes in dim {dim}: they have the logits' shape without its classes"
        )
        raise ConfigError(msg)
    last = input if dim == input.dim() - 1 else input.movedim(dim, -1)
    if inplace:
        try:
            flat = last.view(target.numel(), last.size(-1))
        except RuntimeError:
            msg = (
                f"inplace=True needs logits that are contiguous with the classes last, got shape "
                f"{tuple(input.shape)}, strides {input.stride()} and classes in dim {dim}; leave it out"
            )
            raise ConfigError(msg) from None
    else:
        flat = last.flatten(0, -2) if last.dim() > 1 else last.unsqueeze(0)
    holders = ranks if is_split else ALONE
    options = LossOptions(size, weight, ignore_index, label_smoothing, reduction, z_loss, holders, layer)
    options = read_options(options, input)
    loss = cross_entropy(flat, target.reshape(-1).long(), options, inplace=inplace)
    return loss.view(target.shape) if reduction == "none" else loss


def parallel_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
    z_loss: float = 0.0,
    chunk_rows: int | None = None,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Return the cross entropy of ``input @ weight.T + bias`` without ever holding its logits.

    It joins a head with split outputs and :func:`parallel_cross_entropy`, in chunks of rows. The logits of
    one chunk are in memory at a time, in the forward and in the backward pass.

    With "mean" and "sum" the forward pass computes the gradients, with three products in all as without
    fusion. With "none", and for float16, the logits are computed twice: in float16 a loss scale has to reach
    small gradients.

    Collectives: forward for each chunk an all-gather of 3 or 4 numbers per row, and an all-reduce of the
    input's gradient that overlaps the next products; backward none. If logits are computed twice: forward one
    all-gather, backward the all-reduces.

    Args:
        input: Features, of shape (..., in), the same on all ranks.
        weight: This rank's shard of the head, of shape (local classes, in).
        target: Classes, of shape (...), the same on all ranks.
        bias: This rank's shard, of shape (local classes,).
        class_weight: A factor for each class, of shape (num_classes,), on every rank in full.
        ignore_index: As in :func:`parallel_cross_entropy`, like the following.
        reduction: "mean", "sum" or "none".
        label_smoothing: From 0 to 1.
        num_classes: The number of classes over all ranks. By default it comes from the weight's mark; without
            a mark the ranks' shards have the same size.
        z_loss: The factor of the squared log-sum-exp.
        chunk_rows: The number of rows of logits in memory at a time; by default as many as give 16 million
            logits, 128 at least.
        group: The ranks; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape.

    Raises:
        ConfigError: Shapes and options contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank.
        DisagreementError: Ranks differ in targets or numbers of classes; checked on the CPU alone.
        RuntimeError: A second backward pass where the gradients are computed in the forward pass.

    Example:
        >>> head = ts.nn.ParallelLinear(16, 10, dim=-1)
        >>> x, y = torch.ones(4, 16), torch.arange(4)
        >>> loss = parallel_linear_cross_entropy(x, head.weight, y, head.bias, num_classes=10)
    """
    check_options(reduction, label_smoothing, z_loss)
    check_class_indices(target)
    ranks = as_group(group)
    size = check_head(input, weight, target, num_classes, ranks)
    chunk_rows = read_chunk_rows(chunk_rows, weight.size(0))
    x, w, b = input.reshape(-1, input.size(-1)), weight, bias
    if torch.is_autocast_enabled(input.device.type):
        x, w, b = autocast(x, w, b)
    options = LossOptions(size, class_weight, ignore_index, label_smoothing, reduction, z_loss, ranks, layer)
    options = read_options(options, input)
    flat = target.reshape(-1).long()
    loss = fused_cross_entropy(LinearHead, x, w, b, flat, options, chunk_rows=chunk_rows)
    return loss.view(target.shape) if reduction == "none" else loss


class ParallelCrossEntropyLoss(nn.Module):
    """A ``torch.nn.CrossEntropyLoss`` for logits with classes that may be split over ranks.

    Collectives: forward an all-gather of 3 or 4 numbers per row, backward none; none at all for whole logits.
    :func:`functional.parallel_cross_entropy` explains the options.

    Raises:
        ConfigError: An option has a value that is not listed here.

    Example:
        >>> loss = ParallelCrossEntropyLoss(num_classes=10)
        >>> float(loss(torch.zeros(4, 10), torch.arange(4)))  # on one rank
        2.3025851249694824
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        *,
        parallel: bool | None = None,
        class_dim: int | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing, z_loss)
        if weight is not None and num_classes is not None and weight.shape != (num_classes,):
            msg = (
                f"the weight has a factor for each of {num_classes} classes, got shape {tuple(weight.shape)}"
            )
            raise ConfigError(msg)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.num_classes = num_classes
        self.parallel = parallel
        self.class_dim = class_dim
        self.z_loss = z_loss
        self.inplace = inplace
        self.group = group

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss.

        Args:
            input: Logits of shape (..., classes) or (batch, classes, d1, ...), whole or this rank's
                shard of the classes.
            target: Classes, of the shape of ``input`` without its classes, the same on all ranks.

        Returns:
            A scalar, or with the reduction "none" a tensor of the target's shape.

        Raises:
            ConfigError: Shapes, options and marks contradict each other.
            OutOfRangeError: A target is none of the classes; on every rank.
            DisagreementError: Ranks differ in targets or numbers of classes; checked on the CPU alone.
        """
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            num_classes=self.num_classes,
            parallel=self.parallel,
            class_dim=self.class_dim,
            z_loss=self.z_loss,
            inplace=self.inplace,
            group=self.group,
            layer=self,
        )

    def extra_repr(self) -> str:
        """Return the options of the loss."""
        return (
            f"num_classes={self.num_classes}, reduction={self.reduction!r}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"
        )
