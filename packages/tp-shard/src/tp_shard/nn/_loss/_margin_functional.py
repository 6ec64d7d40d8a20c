"""Functional form of the loss with margins over class centers that are split over ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._group import GroupLike, as_group
from tp_shard.nn._loss._fused import fused_cross_entropy
from tp_shard.nn._loss._margin_head import MarginKind
from tp_shard.nn._loss._options import LossOptions, computed_in
from tp_shard.nn._loss._reading import (
    check_class_indices,
    check_head,
    check_options,
    read_chunk_rows,
    read_options,
)
from tp_shard.nn._loss._sampling import with_sample

__all__ = ["parallel_margin_cross_entropy"]


def parallel_margin_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    m1: float = 1.0,
    m2: float = 0.5,
    m3: float = 0.0,
    scale: float = 64.0,
    monotonic: bool = True,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
    sampled: Tensor | None = None,
    sparse: bool = False,
    chunk_rows: int | None = None,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Return the cross entropy of cosines of features and class centers, with a margin at the targets.

    The logit of a class is ``scale * cos(angle)`` between feature and center, whatever their lengths; that
    of the target is ``scale * (cos(m1 * angle + m2) - m3)``. ``m2`` alone is ArcFace (arXiv:1801.07698),
    ``m3`` alone CosFace (arXiv:1801.09414), ``m1`` alone SphereFace (arXiv:1704.08063) with a scale. No rank
    ever has the logits of all classes, and this rank's logits exist for a chunk of rows at a time.

    Collectives: forward for each chunk an all-gather of 3 or 4 numbers per row, and an all-reduce of the
    features' gradient beside the next products; backward none. With reduction "none", and for float16, where
    a loss scale has to reach small gradients: forward one all-gather, backward the all-reduces. With
    ``sampled`` and label smoothing one more, of a number.

    Args:
        input: Features of shape (..., in), the same on all ranks.
        weight: This rank's shard of the class centers, of shape (local classes, in).
        target: Classes, of shape (...), the same on all ranks.
        m1: By what the target's angle is multiplied.
        m2: What is added to it then, in radians, from 0 to pi.
        m3: What is subtracted from its cosine.
        scale: By what cosines are multiplied.
        monotonic: Whether an angle that the margins bring beyond pi goes on to lower the logit, as SphereFace
            has it; otherwise its cosine rises again.
        ignore_index: Targets that count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: How much of a target is spread over all classes that take part, from 0 to 1.
        num_classes: Over all ranks. By default the weight's mark tells, and without it the ranks'
            shards have the same size.
        sampled: Which of this rank's classes take part, as indices into its shard (:func:`sample_classes`
            draws some); those of the targets always do. ``None`` for all.
        sparse: Whether the centers' gradient is a sparse tensor of those that took part.
        chunk_rows: How many rows of logits exist at a time; by default as many as give 16 million
            logits, 128 at least.
        group: Who; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A scalar, or with "none" a tensor of the target's shape; under autocast a float32.

    Raises:
        ConfigError: Shapes, types and options contradict each other.
        OutOfRangeError: A target is none of the classes; on every rank.
        DisagreementError: Ranks have different targets or count different numbers of classes.
        RuntimeError: A second backward pass where the gradients are computed in the forward pass.

    Example:
        >>> features, centers = torch.randn(4, 16), torch.randn(10, 16)
        >>> loss = parallel_margin_cross_entropy(features, centers, torch.arange(4), m2=0.0, m3=0.35)
    """
    kind = MarginKind(m1, m2, m3, scale, monotonic, sparse)
    check_options(reduction, label_smoothing, 0.0)
    check_class_indices(target)
    ranks = as_group(group)
    size = check_head(input, weight, target, num_classes, ranks)
    if sparse and sampled is None:
        msg = "sparse=True is for the gradient of sampled centers, and all of them take part: leave it out"
        raise ConfigError(msg)
    options = LossOptions(size, None, ignore_index, label_smoothing, reduction, 0.0, ranks, layer)
    options = read_options(options, input)
    flat = target.reshape(-1).long()
    if sampled is not None:
        options = with_sample(options, sampled, flat)
    taking_part = weight.size(0) if options.sampled is None else options.sampled.numel()
    chunk_rows = read_chunk_rows(chunk_rows, taking_part)
    x = input.reshape(-1, input.size(-1))
    unit = F.normalize(x.to(computed_in(x.dtype)), dim=-1).to(_product_type(x, weight))
    loss = fused_cross_entropy(kind, unit, weight, None, flat, options, chunk_rows=chunk_rows)
    return loss.view(target.shape) if reduction == "none" else loss


def _product_type(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type in which features and centers are multiplied.

    Raises:
        ConfigError: Features and centers have different types, and autocast does not make them one.
    """
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype:
        msg = (
            f"features are {x.dtype} and class centers {weight.dtype}: cast one of them, or compute the loss "
            "under torch.autocast"
        )
        raise ConfigError(msg)
    return x.dtype
