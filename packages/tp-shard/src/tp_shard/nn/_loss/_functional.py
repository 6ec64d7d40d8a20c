"""Functional forms of the losses over class shards: what their arguments mean, and what is refused."""

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._group import ALONE, GroupLike, as_group
from tp_shard.nn._linear_functions import autocast
from tp_shard.nn._loss._cross_entropy import cross_entropy
from tp_shard.nn._loss._fused import fused_cross_entropy
from tp_shard.nn._loss._linear_head import LinearKind
from tp_shard.nn._loss._options import LossOptions
from tp_shard.nn._loss._reading import (
    check_class_indices,
    check_head,
    check_local_width,
    check_options,
    check_unambiguous,
    find_class_dim,
    read_chunk_rows,
    read_options,
    read_width,
)

__all__ = ["parallel_cross_entropy", "parallel_linear_cross_entropy"]


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
    """Return the cross entropy of logits whose classes are split over the ranks.

    It equals ``torch.nn.functional.cross_entropy`` of the whole logits, which no rank ever has, as in
    Megatron-LM (arXiv:1909.08053): only a row's maximum, sum of exponentials and target logit travel. Half
    types are computed in float32. Without ``inplace`` the largest thing that it makes is one buffer of
    the logits' size, in the forward pass, which becomes their gradient; for half types it is the gradient.

    Collectives: forward an all-gather of 3 numbers per row, 4 with label smoothing; backward none.
    For logits that are whole there are none.

    Args:
        input: Logits of shape (..., local classes), or as torch has them (batch, local classes, d1,
            ...). Where both readings are possible, whole logits are read as torch does, and split
            ones need ``class_dim``.
        target: Classes, counted over all ranks, of the shape of ``input`` without its classes; the
            same on all ranks.
        weight: A factor for each class, of shape (num_classes,), on every rank in full.
        ignore_index: Targets that count for nothing.
        reduction: "mean" (over the weights of the targets, as torch does), "sum" or "none".
        label_smoothing: How much of a target is spread over all classes, from 0 to 1.
        num_classes: Over all ranks. Logits as wide as that are whole, as wide as this rank's shard
            split. Uneven shards need it, or a mark that carries it.
        parallel: Whether the logits are split. By default ``num_classes`` tells, else their mark (see
            :func:`~tp_shard.get_parallel_dim`); without either they are whole.
        class_dim: Which dimension has the classes: 1 or -1. By default the target's shape tells.
        z_loss: This times ``logsumexp(logits) ** 2`` is added to the loss of each row that counts, as in
            PaLM (arXiv:2204.02311).
        inplace: Whether the logits are overwritten, so that no buffer of their size is made. The
            caller loses them, and there is one backward pass. In compiled code buffers are the compiler's
            concern.
        group: Who; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape; of the logits' type, and under
        autocast a float32.

    Raises:
        ConfigError: Shapes, options and marks contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank. On accelerators and in compiled
            code it is torch's own assertion, as with torch's own loss.
        DisagreementError: Ranks have different targets or count different numbers of classes.
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

    A head with split outputs and :func:`parallel_cross_entropy` in one, computed in chunks of rows:
    the logits of one chunk exist at a time, in the forward and in the backward pass. With "mean" and
    "sum" the gradients are computed in the forward pass, with three products in all as without
    fusion; with "none", and for float16, where a loss scale has to reach small gradients, the logits are
    computed twice.

    Collectives: forward for each chunk an all-gather of 3 or 4 numbers per row, and an all-reduce of
    the input's gradient beside the next products; backward none. Where logits are computed twice:
    forward one all-gather, backward the all-reduces.

    Args:
        input: Of shape (..., in), the same on all ranks.
        weight: This rank's shard of the head, of shape (local classes, in).
        target: Classes, of shape (...), the same on all ranks.
        bias: This rank's shard, of shape (local classes,).
        class_weight: A factor for each class, of shape (num_classes,), on every rank in full.
        ignore_index: As in :func:`parallel_cross_entropy`, like the following.
        reduction: "mean", "sum" or "none".
        label_smoothing: From 0 to 1.
        num_classes: Over all ranks. By default the weight's mark tells, and without it the ranks'
            shards have the same size.
        z_loss: The factor of the squared log-sum-exp.
        chunk_rows: How many rows of logits exist at a time; by default as many as give 16 million
            logits, 128 at least.
        group: Who; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape.

    Raises:
        ConfigError: Shapes and options contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank.
        DisagreementError: Ranks have different targets or count different numbers of classes.
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
    loss = fused_cross_entropy(LinearKind(), x, w, b, flat, options, chunk_rows=chunk_rows)
    return loss.view(target.shape) if reduction == "none" else loss
