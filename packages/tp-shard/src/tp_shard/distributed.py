"""Model-parallel groups: which ranks hold a tensor together, and how they exchange tensors.

Without any process group there is one rank, and the layers of this package equal torch's own.
"""

import atexit
import sys
import time

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not say so
from torch.distributed.device_mesh import DeviceMesh
from tp_core import LaunchEnvironment, rendezvous_store
from tp_core.errors import ConfigError

from tp_shard._collectives import copy, gather, gather_batch, reduce, scatter
from tp_shard._debug import debug, set_debug
from tp_shard._group import ALONE, Group, current_data_group, current_group, set_groups

__all__ = [
    "copy",
    "debug",
    "destroy_process_group",
    "gather",
    "gather_batch",
    "get_data_group",
    "get_group",
    "get_group_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
    "scatter",
    "set_debug",
]

_TENSOR_DIMS = ("tp", "tensor", "model")


def init_process_group(group_size: int | DeviceMesh = -1) -> None:
    """Form the groups over which tensors are split.

    Neighbouring ranks hold tensors together: of 4 ranks in groups of 2, ranks 0 and 1 hold one
    copy of the model and ranks 2 and 3 another. Those who hold the same shard (0 and 2, 1 and 3)
    form data-parallel groups. If a launcher started several processes and torch's own process
    group is not initialised, it is joined here, as the launcher's variables say, and left at the end
    of the program at the latest.

    Args:
        group_size: How many ranks hold a tensor together; -1 for all. Or a mesh: of one axis, or
            of two, data by tensor. Its tensor axis is the one named "tp", "tensor" or "model",
            and else the last.

    Raises:
        ConfigError: The size does not divide the number of ranks, or the groups are formed
            already.
        LaunchEnvironmentError: The launcher's variables are incomplete.

    Collectives: every rank has to call it; it makes new groups.
    """
    if is_initialized():
        msg = "the model-parallel groups are formed already; call destroy_process_group() first"
        raise ConfigError(msg)
    if isinstance(group_size, DeviceMesh):
        set_groups(*_groups_of_mesh(group_size))
        return
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        msg = f"a group size is a number or a DeviceMesh, got {type(group_size).__name__}: {group_size!r}"
        raise ConfigError(msg)
    if dist.is_available() and not dist.is_initialized():
        _join_world()
    alone = not dist.is_available() or not dist.is_initialized()
    set_groups(*(_alone(group_size) if alone else _groups_of_size(group_size)))


def is_initialized() -> bool:
    """Return whether the model-parallel groups are formed."""
    return current_group() is not None


def destroy_process_group() -> None:
    """Forget the model-parallel groups, and take down those of them that were made here."""
    made = list(_made)
    _made.clear()
    set_groups(None, None)
    if dist.is_available() and dist.is_initialized():
        for group in made[:1] if made[:1] == [None] else made:  # the whole takes its parts with it
            dist.destroy_process_group(group)


def get_group() -> dist.ProcessGroup | None:
    """Return torch's group of the ranks that hold tensors together; ``None`` if this is the only one."""
    return _tensor_group().process_group


def get_data_group() -> dist.ProcessGroup | None:
    """Return torch's group of the ranks that hold the same shards; ``None`` if this is the only one."""
    group = current_data_group()
    return None if group is None else group.process_group


def get_rank() -> int:
    """Return this process among the ranks of its model-parallel group; 0 without one."""
    return _tensor_group().rank


def get_world_size() -> int:
    """Return the number of ranks in the model-parallel group; 1 without one."""
    return _tensor_group().size


def get_group_size() -> int:
    """Return the number of ranks that hold a tensor together; 1 without a group."""
    return _tensor_group().size


_made: list[dist.ProcessGroup | None] = []
"""Groups to take down again; ``None`` stands for torch's own group of all ranks."""


def _join_world() -> None:
    """Join torch's group of all processes, if a launcher started several."""
    environment = LaunchEnvironment.read()
    if environment.world_size > 1:
        store = PrefixStore("tp/shard", rendezvous_store(environment))
        dist.init_process_group(store=store, rank=environment.rank, world_size=environment.world_size)
        _made.append(None)
        atexit.register(_leave_world)


def _leave_world() -> None:
    """Take down at the end of a program what it did not: gloo's threads would abort it."""
    # After an uncaught exception the other ranks are not going to do so with us.
    if None in _made and not hasattr(sys, "last_value"):
        time.sleep(0.05)  # gloo's threads may still need the interpreter for the last tensor
        destroy_process_group()


def _tensor_group() -> Group:
    return current_group() or ALONE


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
    mine = ALONE
    for ranks in partition if len(partition[0]) > 1 else ():
        group = dist.new_group(ranks)  # every rank has to take part in making every group
        if rank in ranks:
            _made.append(group)
            mine = Group(ranks.index(rank), len(ranks), group)
    return mine


def _groups_of_mesh(mesh: DeviceMesh) -> tuple[Group, Group]:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim not in (1, 2):
        msg = (
            f"a mesh has one axis, or two: data by tensor; got {mesh.ndim} axes of sizes "
            f'{tuple(mesh.shape)}; take two of them: mesh["dp", "tp"]'
        )
        raise ConfigError(msg)
    axis = next((i for i, name in enumerate(names) if name in _TENSOR_DIMS), mesh.ndim - 1)
    tensor = Group(mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis))
    if mesh.ndim == 1:
        return tensor, ALONE
    return tensor, Group(mesh.get_local_rank(1 - axis), mesh.size(1 - axis), mesh.get_group(1 - axis))
