"""Cutting a tensor into shards."""

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._partition import bounds

__all__ = ["slice"]


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Cut a tensor into shards whose sizes differ by at most one, larger ones first.

    Args:
        tensor: What is cut; of one dimension or more.
        num_partitions: How many shards to make; those beyond the size of the dimension are empty.
        dim: Along which dimension; the last one by default.
        contiguous: Whether the shards are made contiguous. They may still share the storage of
            ``tensor``.

    Returns:
        The shards, views of ``tensor``.

    Raises:
        ConfigError: There is no such dimension, or less than one shard is asked for.

    Example:
        >>> [tuple(t.shape) for t in slice(torch.empty(3, 9), 2, dim=-1)]
        [(3, 5), (3, 4)]
    """
    axis = -1 if dim is None else dim
    if not -tensor.dim() <= axis < tensor.dim():
        msg = f"cannot cut along dim {axis} of a tensor of shape {tuple(tensor.shape)}"
        raise ConfigError(msg)
    if num_partitions < 1:
        msg = f"a tensor is cut into 1 shard or more, got num_partitions={num_partitions!r}"
        raise ConfigError(msg)
    length = tensor.size(axis)
    edges = [bounds(length, num_partitions, i) for i in range(num_partitions)]
    shards = torch.split(tensor, [b - a for a, b in edges], axis)
    return tuple(s.contiguous() for s in shards) if contiguous else tuple(shards)
