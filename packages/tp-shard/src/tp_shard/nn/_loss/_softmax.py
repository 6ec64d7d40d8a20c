"""Cross entropy over classes that are split over ranks: options, the one exchange, loss and gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import DisagreementError

from tp_shard._groups import _debug
from tp_shard._groups._collectives import all_gather_flat, apply, as_output
from tp_shard._groups._group import Group
from tp_shard._split import bounds
from tp_shard.errors import OutOfRangeError

# -- Options of a loss, and the targets as one rank sees them -------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LossOptions:
    """The options of a loss over class shards.

    Attributes:
        num_classes: The number of classes over all ranks.
        weight: A factor for each class, of shape (num_classes,), in the type of the computation.
        ignore_index: The target of rows that do not count.
        label_smoothing: The part of a target that is spread over all classes.
        reduction: "mean", "sum" or "none".
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
        return self.label_smoothing / (self.num_classes if self.sampled is None else self.num_sampled)

    @property
    def columns(self) -> int:
        """The number of values per row that the ranks exchange."""
        return 4 if self.label_smoothing > 0 else 3


class Rows:
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

    def part(self, start: int, stop: int) -> "Rows":
        """Return some of the rows, as views."""
        rows = Rows.__new__(Rows)
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


def exchange(found: Tensor, rows: Rows, options: LossOptions) -> Tensor:
    """Return the values of all ranks, of shape (ranks, rows, columns).

    Each rank checks its targets first and sends the result of the check along. So a wrong target raises on
    all ranks, where a rank that raised alone would leave the others waiting.

    Raises:
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled code
            torch asserts instead.
        DisagreementError: Ranks have different targets, or count different numbers of classes; on the CPU,
            and not in compiled code.

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


def _check_targets(rows: Rows, options: LossOptions) -> list[float]:
    wrong = 0.0
    if rows.target.numel():
        low, high = (int(t) for t in torch.aminmax(rows.target))
        if low < 0 or high >= options.num_classes:
            bad = rows.target[rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))]
            wrong = max(-_OUT_OF_RANGE, min(_OUT_OF_RANGE, float(bad[0]) * 2 + 1)) if bad.numel() else 0.0
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
    logits: Tensor, rows: Rows, options: LossOptions, dtype: torch.dtype, keep: Tensor | None
) -> Tensor:
    """Return the values of this rank's logits that the ranks exchange.

    Args:
        logits: This rank's logits, of shape (rows, local classes).
        rows: Their targets.
        options: The options of the loss.
        dtype: The type of the computation.
        keep: A tensor for ``exp(z - maximum)``, of the logits' shape and of type ``dtype``; it may be
            ``logits`` itself. ``None`` if the exponentials are not needed later.

    Returns:
        A tensor of shape (rows, 3 or 4): the maximum, the sum of the exponentials below it, the
        target's logit or 0, and with label smoothing the weighted sum of the logits.
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
            sums[0].copy_(block.sum(-1, keepdim=True) if weight is None else (block @ weight).unsqueeze(1))
        torch.amax(block, -1, keepdim=True, out=maximum)
        # A row with all classes excluded has the maximum -inf, and -inf minus -inf would be NaN.
        torch.sub(block, maximum.clamp_min(lowest), out=exponentials).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total)
    return found


def merge(everyones: Tensor, rows: Rows, options: LossOptions) -> Merged:
    """Merge the values of all ranks by log-sum-exp.

    Args:
        everyones: The values, of shape (ranks, rows, columns).
        rows: The targets.
        options: The options of the loss.
    """
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
    """Write the gradient of some rows of logits.

    Args:
        out: The result, of shape (rows, local classes); it may be ``logits`` itself.
        logits: The logits; with ``maximum`` the exponentials that :func:`measure` kept.
        maximum: This rank's maximum of each row, if ``logits`` are exponentials.
        merged: ``lse``, ``softmax_factor`` and ``target_factor`` of :class:`Merged`.
        rows: ``index`` and ``mine`` of :class:`Rows`.
        grad: The gradient of each row's loss, 0 for rows that do not count.
        options: The options of the loss.
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


def _saved(merged: Merged, rows: Rows, denominator: Tensor | None) -> tuple[Tensor | None, ...]:
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
            *_saved(merged, rows, denominator),
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
