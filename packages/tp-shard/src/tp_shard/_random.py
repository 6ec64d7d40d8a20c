"""Random states for what differs between the ranks of a group, beside the one that they share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tp_core.errors import StateError

from tp_shard._generators import get_state, set_state
from tp_shard._group import Group, GroupLike, as_group

__all__ = ["RandomTracker"]


class RandomTracker:
    """A stream of random numbers of each rank's own.

    Torch's default generator stays the same on the ranks of a group, for what they all compute alike
    (dropout of a whole activation); what works on a shard draws inside of :meth:`fork`.

    Args:
        seed: The same on all ranks of a group, from which each derives its own.
        group: The ranks; the current model-parallel group by default.

    Example:
        >>> tracker = RandomTracker(1)
        >>> with tracker.fork():
        ...     mask = torch.rand(3)
    """

    def __init__(self, seed: int, *, group: GroupLike = None) -> None:
        self.group: Group = as_group(group)
        self.seed = seed
        self._states: dict[str, torch.Tensor] = {}

    @contextmanager
    def fork(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Draw from this rank's own stream in a block, on a device."""
        place = torch.device(device)
        before = get_state(place, None)
        own = self._states.get(str(place))
        if own is None:
            # Far apart for neighbouring seeds and ranks: the generator is seeded with the sum.
            generator = torch.Generator(place).manual_seed(
                (self.seed + 0x9E3779B1 * (self.group.rank + 1)) % 2**63
            )
            own = generator.get_state()
        set_state(own, place, None)
        try:
            yield
        finally:
            self._states[str(place)] = get_state(place, None)
            set_state(before, place, None)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's streams; each rank has its own to save."""
        return {"rank": self.group.rank, "seed": self.seed, "states": dict(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a tracker of this rank was.

        Raises:
            StateError: The state is another rank's.
        """
        if state["rank"] != self.group.rank:
            msg = f"the random state is that of rank {state['rank']}, and this is rank {self.group.rank}"
            raise StateError(msg)
        self.seed, self._states = state["seed"], dict(state["states"])
