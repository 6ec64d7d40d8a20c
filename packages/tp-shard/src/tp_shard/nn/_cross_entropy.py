"""Cross entropy over classes that are split over ranks: of logits, or fused with a linear head.

What the ranks exchange and how it is merged is in ``_class_shards``; the fusion, in chunks of rows, in
``_fused_loss``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

from tp_shard._groups._collectives import apply, as_output
from tp_shard._groups._group import ALONE, Group, GroupLike, as_group
from tp_shard._shards import get_parallel_dim, get_parallel_size
from tp_shard._split import bounds, shard_sizes
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
from tp_shard.nn._fused_loss import LinearHead, fused_cross_entropy
from tp_shard.nn._split_products import autocast

# -- Cross entropy of logits with classes that are split over ranks -------------------------------


def cross_entropy(logits: Tensor, target: Tensor, options: LossOptions, *, inplace: bool) -> Tensor:
    """Return the loss of rows of logits, of shape (rows, local classes), which ``inplace`` overwrites.

    Forward: an all-gather of 3 or 4 numbers per row. Backward: nothing.
    """
    if torch.compiler.is_compiling():
        return apply(_Compiled, logits, target, options)
    return apply(_CrossEntropy, logits, target, options, inplace)


def _saved(merged: Merged, rows: TargetRows, denominator: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return what both backward passes need beside the logits."""
    of_rows = rows.index, rows.is_local, rows.valid
    return merged.lse, merged.softmax_factor, merged.target_factor, *of_rows, denominator


class _CrossEntropy(torch.autograd.Function):
    """A loss that computes exponentials once and turns them into the gradient in the same buffer.

    With ``inplace`` that is the buffer of the logits. Otherwise it is a new one, which becomes the gradient
    of the first backward pass. A second backward pass computes the exponentials again. So do half types,
    because their buffer of float32 exponentials would be larger than the gradient.

    Forward: an all-gather. Backward: nothing.
    Ranks hold: sharded -> replicated; gradient: replicated -> sharded.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions, inplace: bool) -> Tensor:
        dtype = computed_in(logits.dtype)
        rows = TargetRows(target, options, dtype)
        detached = logits.detach()
        keep = None
        if ctx.needs_input_grad[0] and logits.dtype == dtype:
            keep = detached
            if not inplace:
                keep = torch.empty_like(detached, memory_format=torch.contiguous_format)
        statistics = row_statistics(detached, rows, options, dtype, keep)
        merged = merge(exchange(statistics, rows, options), rows, options)
        denominator = mean_denominator(rows, options)
        ctx.options = options
        ctx.inplace = inplace
        ctx.dtype = dtype
        ctx.buffer = detached if inplace else keep
        if inplace:
            # An operation that saved the logits for its own backward pass then gets autograd's error, where
            # it would compute with overwritten values.
            torch.autograd.graph.increment_version(logits)
        kept_logits = None if inplace else logits
        maximum = None if keep is None else statistics[:, 0].clone()
        ctx.save_for_backward(kept_logits, maximum, *_saved(merged, rows, denominator))
        return reduce_rows(merged.loss, rows.factor, options.reduction).to(returned_in(logits, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, maximum, lse, softmax_factor, target_factor, index, is_local, valid, denominator = (
            ctx.saved_tensors
        )
        out = ctx.buffer
        ctx.buffer = None
        if out is not None:
            logits = out
        elif ctx.inplace:
            refuse_second_backward("inplace=True overwrote its logits", "leave inplace out")
        else:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
            maximum = None  # the buffer has no exponentials: they are computed again
        fill_gradient(
            out,
            logits,
            maximum,
            (lse, softmax_factor, target_factor),
            (index, is_local),
            per_row(grad, valid, denominator, ctx.dtype),
            ctx.options,
        )
        return out, None, None, None


# -- Cross entropy in compiled code ---------------------------------------------------------------
# Without buffers that are filled twice: in a compiled graph buffers and passes are the compiler's concern.


class _Compiled(torch.autograd.Function):
    # Forward: an all-gather. Backward: nothing.
    # Ranks hold: sharded -> replicated; gradient: replicated -> sharded.
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
        dtype = computed_in(logits.dtype)
        rows = TargetRows(target, options, dtype)
        statistics = _row_statistics(logits.to(dtype), rows, options)
        merged = merge(exchange(statistics, rows, options), rows, options)
        ctx.options = options
        ctx.dtype = dtype
        ctx.save_for_backward(logits, *_saved(merged, rows, mean_denominator(rows, options)))
        loss = reduce_rows(merged.loss, rows.factor, options.reduction)
        return as_output(loss.to(returned_in(logits, dtype)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, lse, softmax_factor, target_factor, index, is_local, valid, denominator = ctx.saved_tensors
        options, dtype = ctx.options, ctx.dtype
        row_grad = per_row(grad, valid, denominator, dtype)
        out = torch.exp(logits.to(dtype) - lse.unsqueeze(1)) * (softmax_factor * row_grad).unsqueeze(1)
        if options.label_smoothing > 0:
            smoothing = (row_grad * options.smoothing_per_class).unsqueeze(1)  # (rows, 1)
            weight = options.local_weight
            if weight is not None:
                smoothing = smoothing * weight  # (rows, local classes)
            out = out - smoothing
        if logits.size(1):
            at_target = torch.where(is_local, -target_factor * row_grad, 0).unsqueeze(1)
            out = out.scatter_add(1, index.unsqueeze(1), at_target)
        return out.to(logits.dtype), None, None


def _row_statistics(logits: Tensor, rows: TargetRows, options: LossOptions) -> Tensor:
    """Return the columns of :func:`row_statistics`, for logits in the type of the computation."""
    if logits.size(1) == 0:
        statistics = logits.new_zeros(logits.size(0), options.n_statistics)
        return statistics.index_fill(1, torch.tensor([0], device=logits.device), float("-inf"))
    maximum = logits.amax(-1)
    # A row with all classes excluded has the maximum -inf, and -inf minus -inf would be NaN.
    below = logits - maximum.clamp_min(torch.finfo(logits.dtype).min).unsqueeze(1)
    at_target = torch.where(rows.is_local, logits.gather(1, rows.index.unsqueeze(1)).squeeze(1), 0)
    columns = [maximum, below.exp().sum(-1), at_target]
    if options.label_smoothing > 0:
        weight = options.local_weight
        if weight is None:
            columns.append(logits.sum(-1))
        else:
            columns.append(logits @ weight)
    return torch.stack(columns, 1)


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
    size = num_classes
    if size is None:
        size = get_parallel_size(weight)
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
    classes = num_classes  # over all ranks
    if classes is None and marked:
        classes = get_parallel_size(input)
    if parallel is None:
        parallel = marked
        if num_classes is not None and ranks.size > 1:
            widths = {width}
            if class_dim is None:
                # The classes may be in dim 1, as torch takes them, even if the last dimension fits too.
                widths.add(input.size(min(1, input.dim() - 1)))
            parallel = _is_shard_wide(input, widths, num_classes, ranks)
    if not parallel:
        if num_classes is None:
            num_classes = input.size(find_class_dim(input, target, class_dim, prefer_last=False))
        return num_classes, False
    if classes is None:
        classes = width * ranks.size
    return classes, True


def _is_shard_wide(input: Tensor, widths: set[int], num_classes: int, ranks: Group) -> bool:
    """Return whether logits have the width of this rank's shard, and not of all classes; raise for others."""
    if num_classes == 1:
        msg = "whether logits of one class are split cannot be seen: say parallel=True or False"
        raise ConfigError(msg)
    if num_classes in widths:
        return False
    start, stop = bounds(num_classes, ranks.size, ranks.rank)
    if stop - start in widths:
        return True
    msg = (
        f"logits of shape {tuple(input.shape)} are neither {num_classes} classes wide nor "
        f"{stop - start}, which is the shard of rank {ranks.rank} of {ranks.size}"
    )
    raise ConfigError(msg)


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
    if second and not (last and prefer_last):
        return 1
    return ndim - 1


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
    last = input
    if dim != input.dim() - 1:
        last = input.movedim(dim, -1)  # (..., local classes)
    if inplace:
        try:
            flat = last.view(target.numel(), last.size(-1))
        except RuntimeError:
            msg = (
                f"inplace=True needs logits that are contiguous with the classes last, got shape "
                f"{tuple(input.shape)}, strides {input.stride()} and classes in dim {dim}; leave it out"
            )
            raise ConfigError(msg) from None
    elif last.dim() > 1:
        flat = last.flatten(0, -2)  # (rows, local classes)
    else:
        flat = last.unsqueeze(0)
    holders = ranks if is_split else ALONE
    options = LossOptions(size, weight, ignore_index, label_smoothing, reduction, z_loss, holders, layer)
    options = read_options(options, input)
    loss = cross_entropy(flat, target.reshape(-1).long(), options, inplace=inplace)
    if reduction == "none":
        return loss.view(target.shape)
    return loss


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
    if reduction == "none":
        return loss.view(target.shape)
    return loss


@explain_init
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
