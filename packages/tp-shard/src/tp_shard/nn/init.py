"""Initial values of shards: those that the whole tensor would have had from the same seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_shard._groups import _debug
from tp_shard._groups._group import ALONE, Group, current_data_group, current_group
from tp_shard._groups._random import get_state, set_state
from tp_shard._shards._attributes import get_split
from tp_shard._split import Split
from tp_shard.nn._replay import record, replay

__all__ = ["init_shard_", "shard_init_helper_"]


def shard_init_helper_(init_method: Callable[..., Any], tensor: Tensor, **kwargs: Any) -> None:
    """Initialize a shard with the values that the whole tensor would have had from the same seed.

    The generator of the group's first rank counts, whatever the others were seeded with, and those
    that were seeded alike go on alike. Where torch's method treats each element alike (uniform,
    normal, constant, Xavier's and Kaiming's, and custom methods that are made of them), values
    are drawn in blocks and no rank holds the whole tensor. What does not (orthogonal, sparse, eye,
    dirac; trunc_normal, which torch draws until all elements are within the bounds), and any method
    on an accelerator, makes the whole tensor on each rank for a moment.

    Args:
        init_method: A method of ``torch.nn.init``, or anything that fills a tensor in place.
        tensor: A parameter of a parallel layer, or a tensor with its marks; one without is
            initialized alike on all ranks. Its type is kept. On the meta device nothing happens.
        **kwargs: What else ``init_method`` takes.

    Raises:
        Exception: Whatever ``init_method`` raises, such as a ValueError for a shape that it does not take.

    Collectives: two broadcasts of a generator's state.

    Example:
        >>> layer = ts.nn.ParallelLinear(20, 30, dim=-1)
        >>> shard_init_helper_(torch.nn.init.kaiming_normal_, layer.weight, a=0, mode="fan_in")
    """
    group = current_group() or ALONE
    init_shard_(init_method, tensor, get_split(tensor, group), group, kwargs)


def init_shard_(
    init_method: Callable[..., Any],
    tensor: Tensor,
    split: Split | None,
    group: Group,
    kwargs: dict[str, Any],
) -> None:
    """Do what :func:`shard_init_helper_` does, for a tensor whose cut is known."""
    if tensor.is_meta:
        return
    generator = kwargs.get("generator")
    with same_generator(group, tensor.device, generator), torch.no_grad():
        if split is None or group.size == 1:
            init_method(tensor, **kwargs)
            return
        shape = split.full_shape(tuple(tensor.shape))
        operations = record(init_method, shape, tensor, kwargs)
        target = tensor.data
        if operations is not None and target.is_contiguous():
            replay(operations, target, split, group.rank)
            return
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        init_method(whole, **kwargs)
        target.copy_(split.take(whole, group.rank))


@contextmanager
def same_generator(
    group: Group, device: torch.device, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Draw what the first rank of all would draw: in its data-parallel group, then in ``group``.

    Ranks whose generator was in another state get that one back afterwards.

    Collectives: two broadcasts of a generator's state.
    """
    data = current_data_group() or ALONE
    if group.size == 1 and data.size == 1:
        yield
        return
    state = get_state(device, generator)
    theirs = state.clone()
    for ranks in (data, group):
        if ranks.size > 1:
            theirs = _broadcast(theirs, ranks, device)
    same = torch.equal(state, theirs)
    if not same:
        set_state(theirs, device, generator)
    try:
        yield
    finally:
        if not same:
            set_state(state, device, generator)


def _broadcast(state: Tensor, group: Group, device: torch.device) -> Tensor:
    if _debug.state.enabled:
        _debug.check("broadcast of a generator's state", state, group, None)
    moved = state.to(device)  # NCCL sends nothing from the CPU
    dist.broadcast(moved, group_src=0, group=group.handle)
    return moved.to(state.device)
