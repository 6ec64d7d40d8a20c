"""The group of ranks that hold one tensor together, and the group of ranks that hold the same shard of it."""

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tp_core.errors import ConfigError

from tp_shard._groups import _patches


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A group of ranks that communicate, seen from one of them.

    Copying a group returns the group itself: layers are copied, and torch's process groups cannot be.
    Unpickling one returns the current group if it has that rank and size.

    Attributes:
        rank: This process among the ranks of the group, from 0.
        size: The number of ranks.
        process_group: torch's group; ``None`` if there is no other rank.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    @property
    def handle(self) -> dist.ProcessGroup:
        """Torch's process group, for a collective.

        Raises:
            ConfigError: There is no such group: the layer came out of a pickle into another job.
        """
        if self.process_group is None:
            msg = (
                f"this belongs to shard {self.rank} of {self.size}, and there is no model-parallel "
                f"group of {self.size} ranks in which this process has rank {self.rank}; call "
                f"ts.distributed.init_process_group({self.size}) before it is loaded"
            )
            raise ConfigError(msg)
        return self.process_group

    def __copy__(self) -> "Group":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.rank, self.size)


ALONE = Group()
"""The group of a process without others."""

GroupLike: TypeAlias = Group | dist.ProcessGroup | DeviceMesh | None
"""A group as users give it: ours or torch's, a mesh of one axis, or ``None`` for the current group."""


@dataclass(slots=True)
class _Current:
    tensor: Group | None = None
    data: Group | None = None
    mesh: DeviceMesh | None = None


_current = _Current()


def set_groups(tensor: Group | None, data: Group | None, mesh: DeviceMesh | None = None) -> None:
    _current.tensor = tensor
    _current.data = data
    _current.mesh = mesh


def current_mesh() -> DeviceMesh | None:
    """Return the mesh that the groups were formed from, ``None`` without a mesh."""
    if current_group() is None:
        return None
    return _current.mesh


def current_group() -> Group | None:
    """Return the group over which tensors are split, ``None`` if none is initialized."""
    group = _current.tensor
    if group is None or group.process_group is None or dist.is_initialized():
        return group
    if getattr(group.process_group, "is_simulated", False):
        return group
    return None  # destroying torch's default group has destroyed ours


def as_group(group: GroupLike) -> Group:
    """Return the ranks that ``group`` names.

    Raises:
        ConfigError: ``group`` is ``None``, there are several processes, and no model-parallel group is
            initialized; it is a mesh of several axes; or this process is not in it.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        return current_group() or _alone()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            msg = f'a group is a mesh of one axis, got {group.ndim}; take one of them: mesh["tp"]'
            raise ConfigError(msg)
        group = group.get_group()
    rank = dist.get_rank(group)
    if rank < 0:
        msg = f"this process, rank {dist.get_rank()} of all, is not in the group that was given"
        raise ConfigError(msg)
    size = dist.get_world_size(group)
    if size > 1:
        _patches.install()
    return Group(rank, size, group)


def _alone() -> Group:
    world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if dist.is_initialized():
        world_size = dist.get_world_size()
    if world_size > 1:
        msg = (
            f"there are {world_size} processes and no model-parallel group; call "
            "ts.distributed.init_process_group() first, with a group size of 1 to split nothing"
        )
        raise ConfigError(msg)
    return ALONE


def current_data_group() -> Group | None:
    """Return the group of ranks that hold the same shards, ``None`` if none is initialized."""
    if current_group() is None:
        return None
    return _current.data


def _restore(rank: int, size: int) -> Group:
    if size == 1:
        return ALONE
    group = current_group()
    if group is not None and (group.rank, group.size) == (rank, size):
        return group
    return Group(rank, size)


# -- The axes of a mesh: the one over which tensors are split, and those of the copies of the model


_TENSOR_AXES = ("tp", "tensor", "model")
_DATA_WORDS = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard"})
_OTHER_WORDS = frozenset({"pp", "pipe", "pipeline", "stage", "cp", "context", "sp", "ep", "expert"})


def tensor_axis(mesh: DeviceMesh) -> int:
    """Return the axis over which tensors are split."""
    names = mesh.mesh_dim_names or ()
    by_name = [i for i, name in enumerate(names) if name in _TENSOR_AXES]
    if len(by_name) > 1 or (not by_name and mesh.ndim > 2):
        msg = (
            f"a mesh of {mesh.ndim} axes of sizes {tuple(mesh.shape)} has one named 'tp', 'tensor' or "
            f"'model', over which tensors are split; got the names {names or None}"
        )
        raise ConfigError(msg)
    if by_name:
        return by_name[0]
    return mesh.ndim - 1


def data_axes(mesh: DeviceMesh, tensor_axis: int) -> list[int]:
    """Return the axes along which copies of the model lie."""
    axes = [i for i in range(mesh.ndim) if i != tensor_axis]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    words = {i: set(names[i].lower().split("_")) for i in axes}
    data = [i for i in axes if words[i] & _DATA_WORDS]
    foreign = [i for i in axes if words[i] & _OTHER_WORDS and i not in data]
    unknown = [i for i in axes if i not in data and i not in foreign]
    if len(axes) == 1:
        return data + unknown  # data by tensor, whatever it is called
    if unknown:
        msg = (
            f"what the axis {names[unknown[0]]!r} of a mesh of {names} is for is not known: name axes of "
            "data 'dp', 'dp_replicate', 'dp_shard', 'fsdp' or 'data', or give the mesh without it, such as "
            f"mesh[{', '.join(repr(names[i]) for i in sorted({tensor_axis, *data}))}]"
        )
        raise ConfigError(msg)
    return data


def ranks_of_model(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh that hold this rank's model, in all of its copies."""
    tensor = tensor_axis(mesh)
    return ranks_along(mesh, [tensor, *data_axes(mesh, tensor)])


def ranks_along(mesh: DeviceMesh, axes: list[int]) -> list[int]:
    """Return the ranks of a mesh with the same coordinates as this one in all other axes."""
    coordinates: list[Any] = list(mesh.get_coordinate() or ())
    for axis in range(len(coordinates)):
        if axis in axes:
            coordinates[axis] = slice(None)
    ranks: list[int] = mesh.mesh[tuple(coordinates)].flatten().tolist()
    return ranks


def mesh_of_copies(device_type: str, replicas: int) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same shards as this one, over which to shard those again.

    It is a submesh of the mesh that the groups were formed from. Without one a new mesh of the same groups is
    made, with the axes "dp" and "tp"; with ``replicas``, "dp_replicate", "dp_shard" and "tp".

    Args:
        device_type: The type of device that the ranks compute on.
        replicas: The number of sets of ranks that each hold all pieces of a shard.

    Raises:
        ConfigError: The ranks, or the axes of the given mesh, do not fit this number of replicas.

    Collectives: without a mesh every rank takes part in making new groups.
    """
    mesh = current_mesh()
    if mesh is not None:
        return _part_for_data(mesh, replicas)
    tensor = (current_group() or ALONE).size
    size = dist.get_world_size()
    copies = size // tensor
    if copies % replicas:
        msg = (
            f"replicas={replicas} spreads the copies of the model over as many sets of ranks, and {size} "
            f"ranks in groups of {tensor} hold {copies} copies; give a divisor of {copies}"
        )
        raise ConfigError(msg)
    if replicas == 1:
        return init_device_mesh(device_type, (copies, tensor), mesh_dim_names=("dp", "tp"))["dp"]
    shape = (replicas, copies // replicas, tensor)
    whole = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    return whole["dp_replicate", "dp_shard"]


def _part_for_data(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    names = mesh.mesh_dim_names
    axes = data_axes(mesh, tensor_axis(mesh))
    wide = [i for i in axes if mesh.size(i) > 1] or axes[-1:]
    if names is None or not 1 <= len(wide) <= 2:
        msg = (
            "fully sharded data needs a mesh with one named axis of data, or two, of which the first has "
            f"copies; ts.distributed.init_process_group was given {mesh}"
        )
        raise ConfigError(msg)
    axis_names = tuple(names[i] for i in wide)
    mesh_replicas = mesh.size(wide[0]) if len(wide) == 2 else 1
    if replicas not in (1, mesh_replicas):
        msg = (
            f"replicas={replicas} does not go with the mesh that ts.distributed.init_process_group was "
            f"given, {mesh}: it has {mesh_replicas}; leave replicas out, or give the mesh an axis for them, "
            "such as ('dp_replicate', 'dp_shard', 'tp')"
        )
        raise ConfigError(msg)
    return mesh[axis_names]
