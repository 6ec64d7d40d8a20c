"""Tensor parallelism with plain tensors: parallel layers, loss and sharded state."""

from tp_shard import _marks, distributed, nn
from tp_shard._errors import OutOfRangeError
from tp_shard._marks import get_parallel_dim, register_parallel_attribute, register_parallel_dim
from tp_shard._split import slice_tensor as slice  # noqa: A004 - the name that its users know

_PARALLEL_ATTR = _PARALLEL_DIM = _marks.PARALLEL_DIM
_ORDER_TYPE = _marks.ORDER_TYPE

__all__ = [
    "OutOfRangeError",
    "distributed",
    "get_parallel_dim",
    "nn",
    "register_parallel_attribute",
    "register_parallel_dim",
    "slice",
]
