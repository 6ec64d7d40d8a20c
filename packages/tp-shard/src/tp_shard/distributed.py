"""Model-parallel groups of ranks that hold a tensor together, and the collectives between them.

Without a process group there is one rank, and the layers of this package equal torch's own.
"""

import atexit
import sys
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError
from tp_core.sessions import join_process_group, new_process_group

import tp_shard._guards  # noqa: F401 - registers the replacements in torch while there are groups
from tp_shard._groups import _patches
from tp_shard._groups._collectives import copy, gather, gather_batch, reduce, scatter
from tp_shard._groups._debug import debug, set_debug
from tp_shard._groups._group import (
    ALONE,
    Group,
    current_data_group,
    current_group,
    data_axes,
    ranks_along,
    set_groups,
    tensor_axis,
)

__all__ = [
    "copy",
    "debug",
    "destroy_process_group",
    "gather",
    "gather_batch",
    "get_data_group",
    "get_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "scatter",
    "set_debug",
]


def init_process_group(group_size: int | DeviceMesh = -1) -> None:
    """Form the groups over which tensors are split.

    Neighboring ranks hold tensors together: of 4 ranks in groups of 2, ranks 0 and 1 hold one copy of the
    model and ranks 2 and 3 another. The ranks with the same shard (0 and 2, 1 and 3) form data-parallel
    groups.

    If a launcher started several processes and torch's process group is not initialized, this call joins it
    from the launcher's variables. It is left at the end of the program at the latest.

    While there are groups of several ranks, torch's DistributedDataParallel averages a shard only among the
    ranks that hold it. torch's ``clip_grad_norm_`` and whole-matrix optimizers refuse shards.
    :func:`destroy_process_group` restores torch's own functions.

    Args:
        group_size: The number of ranks that hold a tensor together; -1 for all. Or a mesh: its tensor axis is
            the one named "tp", "tensor" or "model", else the last of at most two axes. Copies of the model
            lie along the other axis, or along all that are named for data: "dp", "dp_replicate",
            "dp_shard", "fsdp", "data" and the like. Axes with other names belong to other parallelisms.

    Raises:
        ConfigError: The size does not divide the number of ranks, or is neither a number nor a mesh. Or the
            names of the mesh's axes do not show their purpose, this rank is not in the mesh, or the groups
            are formed already.
        LaunchEnvironmentError: The launcher's variables are incomplete.

    Collectives: every rank has to call it; it makes new groups.
    """
    if is_initialized():
        msg = "the model-parallel groups are formed already; call destroy_process_group() first"
        raise ConfigError(msg)
    if isinstance(group_size, DeviceMesh):
        groups = _groups_of_mesh(group_size)
    elif isinstance(group_size, bool) or not isinstance(group_size, int):
        msg = f"a group size is a number or a DeviceMesh, got {type(group_size).__name__}: {group_size!r}"
        raise ConfigError(msg)
    else:
        if not dist.is_initialized():
            _join_world()
        alone = not dist.is_initialized()
        if alone:
            groups = _alone(group_size)
        else:
            groups = _groups_of_size(group_size)
    mesh = group_size if isinstance(group_size, DeviceMesh) else None
    set_groups(*groups, mesh)
    if groups[0].size > 1:
        _patches.install()


def is_initialized() -> bool:
    """Return whether the model-parallel groups are formed."""
    return current_group() is not None


def destroy_process_group() -> None:
    """Leave the model-parallel groups, and destroy the process groups that were made for them.

    Call it on every rank, after the last collective. Without groups it does nothing. It restores the
    functions of torch that were replaced while there were groups.
    """
    _patches.remove()
    made, leaves = list(_made), list(_leaves)
    _made.clear()
    _leaves.clear()
    set_groups(None, None)
    if leaves:
        leaves[0]()  # destroying the group of all ranks destroys its subgroups
    elif made and dist.is_initialized():
        time.sleep(0.05)  # gloo's threads may still need the interpreter for the last tensor
        for group in made:
            dist.destroy_process_group(group)


def get_group() -> dist.ProcessGroup | None:
    """Return torch's group of the ranks that hold tensors together; ``None`` if this rank is alone."""
    return (current_group() or ALONE).process_group


def get_data_group() -> dist.ProcessGroup | None:
    """Return torch's group of the ranks that hold the same shards; ``None`` if this rank is alone."""
    group = current_data_group()
    if group is None:
        return None
    return group.process_group


def get_rank() -> int:
    """Return the rank of this process in its model-parallel group, from 0; 0 without one."""
    return (current_group() or ALONE).rank


def get_world_size() -> int:
    """Return the number of ranks in the model-parallel group; 1 without one."""
    return (current_group() or ALONE).size


_made: list[dist.ProcessGroup] = []
"""The process groups that were made here, without the group of all ranks."""

_leaves: list[Callable[[], None]] = []
"""The function that leaves the group of all ranks, if it was joined here."""


def _join_world() -> None:
    """Join torch's group of all processes, if a launcher started several."""
    environment = LaunchEnvironment.read()
    if environment.world_size > 1:
        _leaves.append(join_process_group(environment))
        atexit.register(_leave_world)


def _leave_world() -> None:
    """Leave the groups at the end of a program that did not: gloo's threads would abort the process."""
    # After an uncaught exception the other ranks do not take part, and this rank would wait for them.
    if _leaves and not hasattr(sys, "last_value"):
        destroy_process_group()


def _alone(group_size: int) -> tuple[Group, Group]:
    if group_size not in (-1, 1):
        msg = (
            f"a group of {group_size} ranks was asked for, and this is the only process; start "
            f"them with: torchrun --nproc-per-node {group_size} script.py"
        )
        raise ConfigError(msg)
    return ALONE, ALONE


def _groups_of_size(group_size: int) -> tuple[Group, Group]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    size = world_size if group_size == -1 else group_size
    if size < 1 or world_size % size:
        msg = (
            f"{world_size} ranks cannot form groups of {group_size}; give a divisor of "
            f"{world_size}, or -1 for one group of all"
        )
        raise ConfigError(msg)
    tensor_ranks = [list(range(i, i + size)) for i in range(0, world_size, size)]
    data_ranks = [list(range(i, world_size, size)) for i in range(size)]
    return _form(tensor_ranks, rank), _form(data_ranks, rank)


def _form(partition: list[list[int]], rank: int) -> Group:
    """Make a group of each list of ranks, and return the one with ``rank`` in it."""
    if len(partition) == 1:
        return Group(rank, len(partition[0]), dist.group.WORLD)
    if len(partition[0]) == 1:
        return ALONE
    own_group = ALONE
    # Every rank makes every group, in the same order: `torch.distributed.new_group` needs all ranks, members
    # or not, and a rank that left one out would keep the others waiting.
    for ranks in partition:
        own_group = _group_of(ranks, known_to_all=True) or own_group
    return own_group


def _group_of(ranks: list[int], *, known_to_all: bool) -> Group | None:
    """Make a group; if all ranks know of it, this rank need not be one of its members."""
    group = new_process_group(ranks, known_to_all=known_to_all)
    if group is None:
        return None
    _made.append(group)
    # Its own count of ranks: torch sorts the ranks of a group, and a mesh may have them in another order.
    return Group(dist.get_rank(group), len(ranks), group)


def _groups_of_mesh(mesh: DeviceMesh) -> tuple[Group, Group]:
    if mesh.get_coordinate() is None:
        msg = (
            f"this process, rank {dist.get_rank()} of all, is not in the mesh that was given, {mesh}; give "
            "a mesh of all ranks, or call this on those alone that are in it"
        )
        raise ConfigError(msg)
    axis = tensor_axis(mesh)
    tensor = _group_of_axis(mesh, axis)
    data = data_axes(mesh, axis)
    wide = [i for i in data if mesh.size(i) > 1] or data[:1]
    if len(wide) > 1:
        # Its members alone call it: the mesh may be a part of a larger one, and the ranks of the other parts
        # do not come here.
        return tensor, _group_of(ranks_along(mesh, wide), known_to_all=False) or ALONE
    if not wide:
        return tensor, ALONE
    return tensor, _group_of_axis(mesh, wide[0])


def _group_of_axis(mesh: DeviceMesh, axis: int) -> Group:
    return Group(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis))
