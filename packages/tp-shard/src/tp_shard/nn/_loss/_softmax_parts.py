"""Rows of logits whose classes are split over ranks: what each rank finds, and what they find together.

The idea is that of the vocabulary-parallel loss of Megatron-LM (Shoeybi et al., "Megatron-LM:
Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv:1909.08053): logits
stay where they are, and a few numbers per row travel. Here they travel at once, as in a softmax
that is computed online: each rank sends its own maximum and its sum below that maximum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_shard.nn._loss._options import LossOptions, Rows

__all__ = ["Merged", "block_rows", "fill_gradient", "measure", "merge", "per_row", "reduce_rows"]

_CPU_BLOCK = 1 << 17  # elements: half a megabyte in float32 stays in a core's cache
_DEVICE_BLOCK = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """What the ranks found together, one number per row.

    Attributes:
        lse: The logarithm of the softmax's denominator.
        loss: The loss before reduction.
        softmax_factor: By what the softmax is multiplied in the loss's gradient.
        target_factor: What is subtracted from it at the target.
    """

    lse: Tensor
    loss: Tensor
    softmax_factor: Tensor
    target_factor: Tensor


def block_rows(width: int, device: torch.device) -> int:
    """Return how many rows of logits or centers are worth several passes together."""
    size = _CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    return max(1, size // max(1, width))


def measure(
    logits: Tensor, rows: Rows, options: LossOptions, dtype: torch.dtype, keep: Tensor | None
) -> Tensor:
    """Return what this rank finds in its logits, to be exchanged.

    Args:
        logits: Of shape (rows, local classes).
        rows: Their targets.
        options: What is computed.
        dtype: The type that is computed in.
        keep: Where ``exp(z - maximum)`` is kept, of the logits' shape and of type ``dtype``; it may be
            ``logits`` itself. ``None`` if it is not needed any more.

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
        # A row of which all classes are excluded has no maximum to subtract.
        torch.sub(block, maximum.clamp_min(lowest), out=exponentials).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total)
    return found


def merge(everyones: Tensor, rows: Rows, options: LossOptions) -> Merged:
    """Put together what the ranks found, by log-sum-exp.

    Args:
        everyones: Of shape (ranks, rows, columns).
        rows: The targets.
        options: What is computed.
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
        out: Where to, of shape (rows, local classes); it may be ``logits`` itself.
        logits: The logits; or, where ``maximum`` is given, what :func:`measure` made of them.
        maximum: This rank's maximum of each row, if they were overwritten.
        merged: ``lse``, ``softmax_factor`` and ``target_factor`` of :class:`Merged`.
        rows: ``index`` and ``mine`` of :class:`Rows`.
        grad: The gradient of each row's loss, 0 for rows that do not count.
        options: What is computed.
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
    """Return the loss of all rows: their mean weighted by ``factor``, their sum, or each of them."""
    if reduction == "none":
        return loss
    return loss.sum() / factor.sum() if reduction == "mean" else loss.sum()


def per_row(grad: Tensor, valid: Tensor, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the gradient of each row's loss, 0 for rows that do not count."""
    grad = grad.to(dtype)
    if denominator is not None:
        grad = grad / denominator
    return torch.where(valid, grad, 0)
