"""Names for programs that were written for torchshard.

Such a program changes its import line alone: ``import torchshard as ts`` becomes ``import tp_shard as ts``,
which has these names too. New programs do not need them: layers split themselves, and DistributedDataParallel
handles shards while there are groups.
"""

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._guards import register_ddp_parameters_to_ignore

__all__ = ["register_ddp_parameters_to_ignore", "slice"]

_PARALLEL_ATTR = _PARALLEL_DIM = "_parallel_dim"  # attributes of tensors that such programs read
_ORDER_ATTR = _ORDER_TYPE = "_order_type"


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into shards of sizes that differ by at most one, larger ones first.

    Args:
        tensor: A tensor of one dimension or more.
        num_partitions: The number of shards; those beyond the size of the dimension are empty.
        dim: The dimension to split; the last one by default.
        contiguous: Whether the shards are made contiguous. They may still share the storage of
            ``tensor``.

    Returns:
        The shards, views of ``tensor``.

    Raises:
        ConfigError: The tensor has no such dimension, or ``num_partitions`` is less than 1.

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
    shards = torch.tensor_split(tensor, num_partitions, axis)
    if contiguous:
        return tuple(s.contiguous() for s in shards)
    return tuple(shards)
