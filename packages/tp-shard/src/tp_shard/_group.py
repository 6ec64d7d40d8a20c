"""The ranks that hold one tensor together, and those that hold the same shard of it."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from tp_core.errors import ConfigError

__all__ = ["ALONE", "Group", "current_data_group", "current_group", "set_groups"]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks that communicate, seen from one of them.

    A copy of it is itself: layers hold one, are copied, and torch's groups cannot be. Unpickled
    it is the current group of that rank and size, if there is one.

    Attributes:
        rank: This process among the ranks of the group, from 0.
        size: How many ranks it has.
        process_group: torch's group; ``None`` where there is nobody to talk to.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    @property
    def handle(self) -> dist.ProcessGroup:
        """Torch's group, to communicate in.

        Raises:
            ConfigError: There is none: the layer came out of a pickle into another job.
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


@dataclass(slots=True)
class _Current:
    tensor: Group | None = None
    data: Group | None = None


_current = _Current()


def set_groups(tensor: Group | None, data: Group | None) -> None:
    """Make these the current groups; ``None`` for none."""
    _current.tensor, _current.data = tensor, data


def current_group() -> Group | None:
    """Return the group over which tensors are split, ``None`` if none is initialised."""
    return _current.tensor


def current_data_group() -> Group | None:
    """Return the group of those who hold the same shards, ``None`` if none is initialised."""
    return _current.data


def _restore(rank: int, size: int) -> Group:
    if size == 1:
        return ALONE
    group = _current.tensor
    if group is not None and (group.rank, group.size) == (rank, size):
        return group
    return Group(rank, size)
