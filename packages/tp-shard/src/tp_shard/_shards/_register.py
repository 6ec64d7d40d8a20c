"""Marks that users put on tensors of their own layers."""

import functools
from typing import Any

from torch import Tensor, nn
from tp_core.errors import ConfigError
from tp_core.plugins import SHARDED_ATTRIBUTE

from tp_shard._groups import _patches
from tp_shard._groups._group import current_group
from tp_shard._shards._dtensors import check_data_mesh
from tp_shard._shards._marks import (
    ORDER_TYPE,
    PARALLEL_DIM,
    PARALLEL_SIZE,
    check_dim,
    copy_marks,
    holds_shard,
)

__all__ = ["register_parallel_attribute", "register_parallel_dim"]


def register_parallel_dim(tensor: Tensor, parallel_dim: int | None, *, size: int | None = None) -> None:
    """Mark ``tensor`` as split along ``parallel_dim``, in place.

    Args:
        tensor: Any tensor.
        parallel_dim: 1 or -1 where output features are split, 0 where input features are, as a linear layer
            of shape (out, in) counts them; ``None`` takes the mark away.
        size: The size of that dimension over all shards, which the loss needs where the shards
            are uneven.

    Raises:
        ConfigError: ``parallel_dim`` is another number.

    Example:
        >>> data = torch.empty(20, 30)
        >>> register_parallel_dim(data, -1)
        >>> get_parallel_dim(data)
        -1
    """
    check_dim(parallel_dim)
    setattr(tensor, PARALLEL_DIM, parallel_dim)
    setattr(tensor, PARALLEL_SIZE, None if parallel_dim is None else size)
    if isinstance(tensor, nn.Parameter):
        group = current_group()
        is_split = parallel_dim is not None and group is not None and group.size > 1
        setattr(tensor, SHARDED_ATTRIBUTE, is_split)
        if is_split:
            _carry_marks()


def register_parallel_attribute(
    tensor: Tensor, parallel_dim: int | None, order_type: int = 0, *, size: int | None = None
) -> None:
    """Mark a parameter of a custom layer as split, in place.

    Args:
        tensor: The parameter.
        parallel_dim: Which of its dimensions is split, in the order that ``order_type`` says;
            ``None`` takes the mark away.
        order_type: 0 for a parameter of shape (out, in), where ``parallel_dim`` counts the other
            way round, as in a linear layer; 1 for (in, out), as in an embedding.
        size: The size of that dimension over all shards; by default all have the size of this one.

    Raises:
        ConfigError: ``parallel_dim`` or ``order_type`` is another number.
    """
    if order_type not in (0, 1):
        msg = f"order_type is 0 for (out, in) or 1 for (in, out), got {order_type!r}"
        raise ConfigError(msg)
    register_parallel_dim(tensor, parallel_dim, size=size)
    setattr(tensor, ORDER_TYPE, order_type)


def _carry_marks() -> None:
    """Let parameters that users marked keep their marks under ``fully_shard``, while there are groups.

    Layers of this package need none of it. A plain module does not notice that it gets another parameter:
    torch's own class for one has to be asked, which is private; a test notices its loss.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original: Any
    gather: Any
    original, gather = FSDPParam._init_sharded_param, FSDPParam.init_unsharded_param
    if hasattr(original, "_tp_shard"):
        return

    @functools.wraps(original)
    def shard(self: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        original(self, param, *args, **kwargs)
        group = current_group()
        if holds_shard(param) and group is not None and _patches.is_active():
            check_data_mesh(self.sharded_param, group, f"a parameter of shape {tuple(param.shape)}")
            copy_marks(param, self.sharded_param)

    @functools.wraps(gather)
    def unshard(self: Any) -> None:
        gather(self)
        if _patches.is_active():
            copy_marks(self.sharded_param, self._unsharded_param)

    shard._tp_shard = True  # type: ignore[attr-defined]  # our own note
    _patches.also(_patches.replace(FSDPParam, "_init_sharded_param", shard))
    _patches.also(_patches.replace(FSDPParam, "init_unsharded_param", unshard))
