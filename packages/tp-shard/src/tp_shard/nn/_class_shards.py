"""A loss over classes that are split over ranks: its options, its one exchange, its values and gradients.

The hidden values (batch, features) are on every rank of the group, and each rank has rows of the class
matrix. Its product gives logits (batch, classes / ranks). Each rank takes three statistics of its logits:
the largest one, the sum of exponentials, and the target's logit if it has it. Forward exchanges these once
per row, never logits, so that the loss (batch,) is the same on every rank. Backward is softmax - target, from
what forward kept, without a collective. The layer before sums the gradient of the hidden values over the
group.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from tp_core.errors import DisagreementError

from tp_shard._groups import _debug
from tp_shard._groups._collectives import all_gather_flat
from tp_shard._groups._group import Group
from tp_shard._split import bounds
from tp_shard.errors import OutOfRangeError

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
        if self.weight is None:
            return None
        start, stop = self.bounds
        return self.weight[start:stop]

    @property
    def smoothing_per_class(self) -> float:
        """The part of a target that goes to each class with a logit."""
        if self.label_smoothing == 0:
            return 0.0
        if self.sampled is None:
            return self.label_smoothing / self.num_classes
        return self.label_smoothing / self.num_sampled

    @property
    def n_statistics(self) -> int:
        """The number of values per row that the ranks exchange."""
        if self.label_smoothing > 0:
            return 4
        return 3


class TargetRows:
    """The targets of some rows, as one rank sees them. All tensors have shape (rows,).

    Attributes:
        target: The classes.
        valid: Whether the row counts.
        is_local: Whether the target is a class of this rank.
        index: The target's place among this rank's logits, 0 for targets of other ranks.
        factor: The weight of the target's class, 0 for rows that do not count.
    """

    __slots__ = ("factor", "index", "is_local", "target", "valid")

    def __init__(self, target: Tensor, options: LossOptions, dtype: torch.dtype) -> None:
        start, stop = options.bounds
        self.target = target
        self.valid = target != options.ignore_index
        self.is_local = self.valid & (target >= start) & (target < stop)
        index = target - start
        if options.sampled is not None:
            index = torch.searchsorted(options.sampled, index)
        self.index = torch.where(self.is_local, index, 0)
        if options.weight is None:
            self.factor = self.valid.to(dtype)
        else:
            # A target out of range would index past the weights before the exchange can report it.
            safe = torch.where(self.valid, target, 0).clamp_(0, options.num_classes - 1)
            self.factor = torch.where(self.valid, options.weight[safe], 0)

    def part(self, start: int, stop: int) -> "TargetRows":
        rows = TargetRows.__new__(TargetRows)
        for name in self.__slots__:
            setattr(rows, name, getattr(self, name)[start:stop])
        return rows


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a loss of logits of ``dtype`` is computed."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def returned_in(logits: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the loss: the type of the logits, as in torch's loss; under autocast ``dtype``."""
    if torch.is_autocast_enabled(logits.device.type):
        return dtype
    return logits.dtype


# -- The one exchange of a loss, which includes the check of the targets --------------------------


_HEADER = 3  # values before the rows: a wrong target or 0, the number of classes, a checksum of the targets
_EXACT = 1 << 23  # float32 represents integers below it exactly
_OUT_OF_RANGE = float(1 << 24)


def exchange(statistics: Tensor, rows: TargetRows, options: LossOptions) -> Tensor:
    """Return the row statistics of all ranks, of shape (ranks, rows, 3 or 4).

    Each rank checks its targets first and sends the result of the check along. So a wrong target raises on
    all ranks, where a rank that raised alone would leave the others waiting.

    Raises:
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled code
            torch asserts instead.

    Collectives: one all-gather; none on one rank.
    Ranks hold: varying -> replicated.
    """
    group = options.group
    # Reading values would wait for an accelerator and break a compiled graph in two.
    has_values = not hasattr(statistics, "fake_mode")
    can_read = statistics.device.type == "cpu" and has_values and not torch.compiler.is_compiling()
    if can_read:
        header = _check_targets(rows, options)
    else:
        header = [0.0] * _HEADER
        wrong = rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))
        # Private: torch has no public assertion that does not wait for the device. The test
        # `a_wrong_target_is_an_error_in_the_graph_too` notices its loss.
        torch._assert_async(~wrong.any(), "a target is none of the classes")  # type: ignore[no-untyped-call,unused-ignore]  # torch leaves it so
    if group.size == 1:
        _refuse_wrong([header], options)
        return statistics.unsqueeze(0)
    if _debug.state.enabled:
        _debug.check("all_gather", statistics, group, options.layer or "the loss")
    message = torch.cat([statistics.new_tensor(header), statistics.view(-1)])
    gathered = message.new_empty(group.size, message.numel())  # (ranks, 3 + rows * statistics)
    all_gather_flat(gathered, message, group)
    if can_read:
        _refuse_wrong(gathered[:, :_HEADER].tolist(), options)
    return gathered[:, _HEADER:].view(group.size, *statistics.shape)


def _check_targets(rows: TargetRows, options: LossOptions) -> list[float]:
    """Return the header of this rank: a code for its first wrong target, the classes, and a checksum."""
    code = 0.0
    if rows.target.numel():
        low, high = (int(t) for t in torch.aminmax(rows.target))
        if low < 0 or high >= options.num_classes:
            wrong = rows.target[rows.valid & ((rows.target < 0) | (rows.target >= options.num_classes))]
            if wrong.numel():
                # Odd, and so never 0, which stands for none.
                code = float(wrong[0]) * 2 + 1
                code = max(-_OUT_OF_RANGE, min(_OUT_OF_RANGE, code))
    # Factors, so that the checksum depends on the order.
    places = torch.arange(1, rows.target.numel() + 1)
    checksum = float(int(rows.target.dot(places)) % _EXACT)
    return [code, float(options.num_classes % _EXACT), checksum]


def _refuse_wrong(headers: list[list[float]], options: LossOptions) -> None:
    classes = [int(h[1]) for h in headers]
    if len(set(classes)) > 1:
        msg = (
            f"ranks count different numbers of classes: {classes}, by rank; where class shards are uneven, "
            "or the mark that carries their number was lost, say num_classes="
        )
        raise DisagreementError(msg)
    for rank, (code, _, _) in enumerate(headers):
        if code:
            target = "a target"
            if abs(code) < _OUT_OF_RANGE:
                target = f"target {int((code - 1) / 2)}"
            msg = (
                f"{target} on rank {rank} is not one of {options.num_classes} classes, 0 to "
                f"{options.num_classes - 1}, nor ignore_index={options.ignore_index}"
            )
            raise OutOfRangeError(msg)
    checksums = [h[2] for h in headers]
    if len(set(checksums)) > 1:
        msg = (
            "ranks that hold the classes together have different targets; each of them needs the same "
            "rows: gather the batch and its targets first (ts.distributed.gather_batch)"
        )
        raise DisagreementError(msg)


# -- The statistics of each rank, and their merge -------------------------------------------------
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


def row_statistics(
    logits: Tensor, rows: TargetRows, options: LossOptions, dtype: torch.dtype, keep: Tensor | None
) -> Tensor:
    """Return what the ranks exchange, (rows, 3 or 4), of this rank's logits, (rows, local classes).

    It is the maximum, the sum of the exponentials below it, the target's logit or 0, and with label smoothing
    the weighted sum of the logits. ``keep`` gets ``exp(z - maximum)`` in ``dtype`` and may be ``logits``
    itself; it is ``None`` if the exponentials are not needed later.
    """
    n_rows, n_classes = logits.shape
    statistics = torch.zeros(n_rows, options.n_statistics, dtype=dtype, device=logits.device)
    if n_classes == 0 or n_rows == 0:
        statistics[:, 0] = float("-inf")
        return statistics
    weight = options.local_weight
    at_target = logits.gather(1, rows.index.unsqueeze(1)).squeeze(1)  # (rows,)
    statistics[:, 2] = torch.where(rows.is_local, at_target.to(dtype), 0)
    lowest = torch.finfo(dtype).min
    step = block_rows(n_classes, logits.device)
    blocks = torch.split(logits, step)
    if keep is None:
        # One scratch buffer for all blocks: nobody reads their exponentials later.
        scratch = torch.empty(blocks[0].shape, dtype=dtype, device=logits.device)
        buffers = (scratch,) * len(blocks)
    else:
        buffers = torch.split(keep, step)
    columns = (torch.split(column, step) for column in torch.split(statistics, 1, 1))
    for block, buffer, maximum, total, _, *sums in zip(blocks, buffers, *columns, strict=True):
        exponentials = buffer
        if keep is None:
            exponentials = buffer[: block.size(0)]
        if block.dtype != dtype:
            block = exponentials.copy_(block)  # noqa: PLW2901 - the same numbers
        if sums:
            if weight is None:
                sums[0].copy_(block.sum(-1, keepdim=True))
            else:
                sums[0].copy_((block @ weight).unsqueeze(1))
        torch.amax(block, -1, keepdim=True, out=maximum)
        # A row with all classes excluded has the maximum -inf, and -inf minus -inf would be NaN.
        torch.sub(block, maximum.clamp_min(lowest), out=exponentials).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total)
    return statistics


def merge(gathered: Tensor, rows: TargetRows, options: LossOptions) -> Merged:
    """Merge the statistics of all ranks, of shape (ranks, rows, 3 or 4), by log-sum-exp."""
    maximum = gathered[..., 0].amax(0)
    below = (gathered[..., 0] - maximum).exp_()  # (ranks, rows)
    lse = (below * gathered[..., 1]).sum(0).log_().add_(maximum)
    smoothing = options.label_smoothing
    target_factor = rows.factor * (1 - smoothing)
    loss = target_factor * torch.where(rows.valid, lse - gathered[..., 2].sum(0), 0)
    softmax_factor = target_factor
    if smoothing > 0:
        per_class = options.smoothing_per_class
        total: Tensor | float = smoothing
        if options.weight is not None:
            total = per_class * options.weight.sum()
        terms = total * lse - per_class * gathered[..., 3].sum(0)
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
    exponentials that :func:`row_statistics` kept. ``merged`` has ``lse``, ``softmax_factor`` and
    ``target_factor`` of :class:`Merged`, and ``rows`` has ``index`` and ``is_local`` of :class:`TargetRows`.
    ``grad`` is 0 for rows that do not count.
    """
    lse, softmax_factor, target_factor = merged
    index, is_local = rows
    n_rows, n_classes = logits.shape
    if n_rows == 0 or n_classes == 0:
        return
    dtype = grad.dtype
    factor = softmax_factor * grad  # (rows,)
    if maximum is not None:
        factor = factor * (maximum - lse).exp_()
    at_target = torch.where(is_local, -target_factor * grad, 0).unsqueeze(1)  # (rows, 1)
    weight = options.local_weight
    if maximum is not None and out.dtype == dtype and options.label_smoothing == 0:  # a single pass
        torch.mul(logits, factor.unsqueeze(1), out=out).scatter_add_(1, index.unsqueeze(1), at_target)
        return
    smoothing = (grad * options.smoothing_per_class).unsqueeze(1)  # (rows, 1)
    scratch: Tensor | None = None
    step = block_rows(n_classes, logits.device)
    for a in range(0, n_rows, step):
        b = min(n_rows, a + step)
        block = out[a:b]
        if out.dtype != dtype:
            # Half types are computed in float32, block by block in one buffer.
            if scratch is None:
                scratch = torch.empty(block.shape, dtype=dtype, device=out.device)
            block = scratch[: b - a]
        block_factor = factor[a:b].unsqueeze(1)
        if maximum is not None:
            torch.mul(logits[a:b], block_factor, out=block)
        else:
            own = logits[a:b]
            if own.dtype != dtype:
                own = block.copy_(own)
            torch.sub(own, lse[a:b].unsqueeze(1), out=block).exp_().mul_(block_factor)
        if options.label_smoothing > 0:
            if weight is None:
                block.sub_(smoothing[a:b])
            else:
                block.addcmul_(smoothing[a:b], weight.unsqueeze(0), value=-1)
        block.scatter_add_(1, index[a:b].unsqueeze(1), at_target[a:b])
        if block.dtype != out.dtype:
            out[a:b].copy_(block)


def mean_denominator(rows: TargetRows, options: LossOptions) -> Tensor | None:
    """Return what a mean divides by, the weights of all targets; ``None`` for other reductions."""
    if options.reduction != "mean":
        return None
    return rows.factor.sum()


def reduce_rows(loss: Tensor, factor: Tensor, reduction: str) -> Tensor:
    """Reduce the loss of all rows: to their mean weighted by ``factor``, their sum, or not at all."""
    if reduction == "none":
        return loss
    if reduction == "mean":
        return loss.sum() / factor.sum()
    return loss.sum()


def per_row(grad: Tensor, valid: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the gradient of each row's loss, 0 for rows that do not count."""
    grad = grad.to(dtype)
    if denominator is not None:
        grad = grad / denominator
    return torch.where(valid, grad, 0)


def refuse_second_backward(reason: str, remedy: str) -> NoReturn:
    """Raise for a second backward pass through a loss that kept its buffers for one."""
    msg = (
        f"backward() was called twice on this loss, but {reason} in the first call; compute the loss again, "
        f"or {remedy} where two backward passes are needed"
    )
    raise RuntimeError(msg)
