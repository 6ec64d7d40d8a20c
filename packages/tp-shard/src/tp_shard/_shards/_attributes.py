"""Tensor attributes that mark the dimension that is split over ranks.

They are for people, and for code that was written with them. Most operations drop them, so no layer of this
package depends on the marks of an activation.
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
"""The attribute with the split dimension, as the layers count: inputs 0, outputs 1 or -1."""
ORDER_TYPE = "_order_type"
"""The attribute with the order of a parameter's dimensions: 0 for (out, in), 1 for (in, out)."""
PARALLEL_SIZE = "_parallel_size"
"""The attribute with the size of the split dimension over all shards."""
PARALLEL_RANGES = "_parallel_ranges"
"""The attribute with the pieces that each rank holds of it, if the split is not even."""

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
    """Return the order of a parameter's dimensions; 0 if it is not marked."""
    order: int = getattr(tensor, ORDER_TYPE, 0)
    return order


def get_parallel_size(tensor: Tensor) -> int | None:
    """Return the size of the split dimension over all shards, ``None`` if the mark lacks it."""
    size: int | None = getattr(tensor, PARALLEL_SIZE, None)
    return size


def mark_parameter(
    tensor: Tensor, parallel_dim: int | None, order_type: int, *, split: Split | None, sharded: bool
) -> None:
    """Mark a parameter of a layer that knows its split.

    The marks are plain numbers: torch saves the attributes of parameters, and does not load our classes.
    """
    setattr(tensor, PARALLEL_DIM, parallel_dim)
    setattr(tensor, ORDER_TYPE, order_type)
    setattr(tensor, PARALLEL_SIZE, None if split is None else split.size)
    setattr(tensor, PARALLEL_RANGES, None if split is None or split.is_even else split.ranges)
    setattr(tensor, SHARDED_ATTRIBUTE, sharded)


def is_marked(parameter: Tensor) -> bool:
    """Return whether a parameter is marked, as a shard or as whole."""
    return getattr(parameter, SHARDED_ATTRIBUTE, None) is not None


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Copy the marks of a parameter to another one that takes its place."""
    for name in (PARALLEL_DIM, ORDER_TYPE, PARALLEL_SIZE, PARALLEL_RANGES, SHARDED_ATTRIBUTE):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def get_split(tensor: Tensor, group: Group) -> Split | None:
    """Return the split of a marked tensor, ``None`` if it is not split.

    A mark without a size means that all ranks hold shards of the same size.
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
    """Return whether a parameter holds a shard: by the note of its layer, or else by its mark."""
    noted: bool | None = getattr(tensor, SHARDED_ATTRIBUTE, None)
    return get_parallel_dim(tensor) is not None if noted is None else bool(noted)


def tensor_dim(parallel_dim: int, order_type: int, ndim: int) -> int:
    """Return the dimension of the tensor itself for ``parallel_dim``.

    A vector has one dimension only: it is the bias of a layer with split outputs.
    """
    if ndim == 1:
        return 0
    if order_type == 1:
        return parallel_dim % ndim
    return 1 if parallel_dim == 0 else 0


def check_dim(parallel_dim: object) -> None:
    """Raise unless a layer can be split along this dimension.

    Raises:
        ConfigError: ``parallel_dim`` is not 1, -1, 0 or ``None``.
    """
    if parallel_dim not in _DIMS or isinstance(parallel_dim, bool):
        msg = (
            "a layer is split along dim 1 or -1 (output features), 0 (input features) or None "
            f"(not split), got {parallel_dim!r}"
        )
        raise ConfigError(msg)


# -- Marks of users on the tensors of their own layers --------------------------------------------


def register_parallel_dim(tensor: Tensor, parallel_dim: int | None, *, size: int | None = None) -> None:
    """Mark ``tensor`` as split along ``parallel_dim``, in place.

    Args:
        tensor: Any tensor.
        parallel_dim: 1 or -1 for split output features, 0 for split input features, as a linear layer of
            shape (out, in) counts them; ``None`` removes the mark.
        size: The size of that dimension over all shards. The loss needs it if the shards are uneven.

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
        parallel_dim: The dimension that is split, counted as ``order_type`` says; ``None`` removes the mark.
        order_type: 0 for a parameter of shape (out, in), where ``parallel_dim`` counts the other way round,
            as in a linear layer; 1 for (in, out), as in an embedding.
        size: The size of that dimension over all shards; by default all shards have the size of this one.

    Raises:
        ConfigError: ``parallel_dim`` or ``order_type`` is another number.
    """
    if order_type not in (0, 1):
        msg = f"order_type is 0 for (out, in) or 1 for (in, out), got {order_type!r}"
        raise ConfigError(msg)
    register_parallel_dim(tensor, parallel_dim, size=size)
    setattr(tensor, ORDER_TYPE, order_type)


def _carry_marks() -> None:
    """Keep the marks of users on parameters under ``fully_shard``, while there are groups.

    A layer of this package restores its marks itself. A plain module does not notice that ``fully_shard``
    replaces its parameters.
    """
    # Private: torch's class for one sharded parameter is the only place where the old parameter and the new
    # one meet. The test `parameters_with_marks_of_ones_own_keep_them` notices its loss.
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

    shard._tp_shard = True  # type: ignore[attr-defined]  # so that a second mark does not wrap it again
    _patches.also(_patches.replace(FSDPParam, "_init_sharded_param", shard))
    _patches.also(_patches.replace(FSDPParam, "init_unsharded_param", unshard))
