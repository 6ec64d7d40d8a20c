"""The ranks that hold one tensor together, and those that hold the same shard of it."""

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tp_core.errors import ConfigError

from tp_shard._groups import _patches

__all__ = [
    "ALONE",
    "Group",
    "GroupLike",
    "as_group",
    "current_data_group",
    "current_group",
    "current_mesh",
    "set_groups",
]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks that communicate, seen from one of them.

    A copy of it is itself: layers hold one, are copied, and torch's groups cannot be. Unpickled
    it is the current group of that rank and size, if there is one.

    Attributes:
        rank: This process among the ranks of the group, from 0.
        size: How many ranks it has.
        process_group: torch's group; ``None`` where there is no other rank.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    @property
    def handle(self) -> dist.ProcessGroup:
        """Torch's group, to communicate in.

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
"""Names a group: one of ours or torch's, a mesh of one axis, ``None`` for the current one."""


@dataclass(slots=True)
class _Current:
    tensor: Group | None = None
    data: Group | None = None
    mesh: DeviceMesh | None = None


_current = _Current()


def set_groups(tensor: Group | None, data: Group | None, mesh: DeviceMesh | None = None) -> None:
    """Make these the current groups; ``None`` for none.

    Args:
        tensor: Those over which tensors are split.
        data: Those who hold the same shards.
        mesh: What they were formed from, if it was a mesh.
    """
    _current.tensor, _current.data, _current.mesh = tensor, data, mesh


def current_mesh() -> DeviceMesh | None:
    """Return the mesh that the groups were formed from, ``None`` if they were formed otherwise."""
    return None if current_group() is None else _current.mesh


def current_group() -> Group | None:
    """Return the group over which tensors are split, ``None`` if none is initialized."""
    group = _current.tensor
    if group is None or group.process_group is None or dist.is_initialized():
        return group
    if getattr(group.process_group, "is_simulated", False):
        return group
    return None  # those who took torch's own groups down took ours with them


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
    if dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    else:
        world_size = int(os.environ.get("WORLD_SIZE") or 1)
    if world_size > 1:
        msg = (
            f"there are {world_size} processes and no model-parallel group; call "
            "ts.distributed.init_process_group() first, with a group size of 1 to split nothing"
        )
        raise ConfigError(msg)
    return ALONE


def current_data_group() -> Group | None:
    """Return the group of those who hold the same shards, ``None`` if none is initialized."""
    return None if current_group() is None else _current.data


def _restore(rank: int, size: int) -> Group:
    if size == 1:
        return ALONE
    group = current_group()
    if group is not None and (group.rank, group.size) == (rank, size):
        return group
    return Group(rank, size)
