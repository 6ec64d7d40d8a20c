"""Attributes that say of a tensor which of its dimensions is split over ranks.

They are for people and for code that was written with them: most operations drop them, so no
layer of this package depends on the marks of an activation.
"""

import functools
from typing import Any

from torch import Tensor, nn
from tp_core.errors import ConfigError
from tp_core.plugins import SHARDED_ATTRIBUTE

from tp_shard._groups import _patches
from tp_shard._groups._group import Group, current_group
from tp_shard._shards._dtensors import check_data_mesh
from tp_shard._split import Split

PARALLEL_DIM = "_parallel_dim"
"""The attribute that names the split dimension, as the layers count: inputs 0, outputs 1 or -1."""
ORDER_TYPE = "_order_type"
"""The attribute that says how a parameter's dimensions stand: 0 for (out, in), 1 for (in, out)."""
PARALLEL_SIZE = "_parallel_size"
"""The attribute with the size of the split dimension over all shards."""
PARALLEL_RANGES = "_parallel_ranges"
"""The attribute with what each rank holds of it, where that is not an even cut."""

_DIMS = (None, 0, 1, -1)


def get_parallel_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which ``tensor`` is marked as split: 1, -1, 0 or ``None``.

    Example:
        >>> get_parallel_dim(torch.empty(20, 30)) is None
        True
    """
    dim: int | None = getattr(tensor, PARALLEL_DIM, None)
    return dim


def get_order_type(tensor: Tensor) -> int:
    """Return how the dimensions of a parameter stand; 0 where it is not marked."""
    order: int = getattr(tensor, ORDER_TYPE, 0)
    return order


def get_parallel_size(tensor: Tensor) -> int | None:
    """Return the size that the split dimension has over all shards, if the mark carries it."""
    size: int | None = getattr(tensor, PARALLEL_SIZE, None)
    return size


def mark_parameter(
    tensor: Tensor, parallel_dim: int | None, order_type: int, *, split: Split | None, sharded: bool
) -> None:
    """Mark a parameter of a layer that knows how it is cut.

    Plain numbers only: torch saves the attributes of parameters, and loads no classes of ours.
    """
    setattr(tensor, PARALLEL_DIM, parallel_dim)
    setattr(tensor, ORDER_TYPE, order_type)
    setattr(tensor, PARALLEL_SIZE, None if split is None else split.size)
    setattr(tensor, PARALLEL_RANGES, None if split is None or split.is_even else split.ranges)
    setattr(tensor, SHARDED_ATTRIBUTE, sharded)


def is_marked(parameter: Tensor) -> bool:
    """Return whether a parameter is known to hold a shard or not to."""
    return getattr(parameter, SHARDED_ATTRIBUTE, None) is not None


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Put the marks of a parameter on another one that stands for it."""
    for name in (PARALLEL_DIM, ORDER_TYPE, PARALLEL_SIZE, PARALLEL_RANGES, SHARDED_ATTRIBUTE):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def get_split(tensor: Tensor, group: Group) -> Split | None:
    """Return how a marked tensor is cut, ``None`` if it is not split.

    A mark without a size stands for shards of the same size on all ranks.
    """
    parallel_dim = get_parallel_dim(tensor)
    if parallel_dim is None:
        return None
    dim = tensor_dim(parallel_dim, get_order_type(tensor), tensor.dim())
    size = get_parallel_size(tensor)
    if size is None:
        size = tensor.size(dim) * group.size
    ranges = getattr(tensor, PARALLEL_RANGES, None)
    return Split.even(dim, size, group.size) if ranges is None else Split(dim, size, ranges)


def holds_shard(tensor: Tensor) -> bool:
    """Return whether a parameter holds a shard: as its layer says, or else by its mark."""
    noted: bool | None = getattr(tensor, SHARDED_ATTRIBUTE, None)
    return get_parallel_dim(tensor) is not None if noted is None else bool(noted)


def tensor_dim(parallel_dim: int, order_type: int, ndim: int) -> int:
    """Return which dimension of the tensor itself ``parallel_dim`` means.

    A vector has one dimension only: the bias of a layer with split outputs.
    """
    if ndim == 1:
        return 0
    if order_type == 1:
        return parallel_dim % ndim
    return 1 if parallel_dim == 0 else 0


def check_dim(parallel_dim: object) -> None:
    """Make sure that it is a dimension to split along.

    Raises:
        ConfigError: ``parallel_dim`` is not 1, -1, 0 or ``None``.
    """
    if parallel_dim not in _DIMS or isinstance(parallel_dim, bool):
        msg = (
            "a layer is split along dim 1 or -1 (output features), 0 (input features) or None "
            f"(not split), got {parallel_dim!r}"
        )
        raise ConfigError(msg)


# -- Marks that users put on tensors of their own layers ------------------------------------------


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
