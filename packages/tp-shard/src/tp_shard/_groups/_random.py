"""Random generator states that differ between the ranks of a group, beside the state that they share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError, StateError
from tp_core.random import device_rng_state, seed_device, set_device_rng_state

from tp_shard._groups._group import Group, GroupLike, as_group


class RandomTracker:
    """A stream of random numbers of each rank's own that follows torch's default generator.

    Torch's default generator stays the same on the ranks of a group, for what all of them compute, such as
    dropout of a whole activation. Operations on a shard draw inside :meth:`fork`. Each fork takes one number
    from the default generator of the CPU and mixes the rank into it. Restoring that generator therefore
    restores the masks: in a resumed run, and when ``torch.utils.checkpoint`` computes a forward pass again.
    Megatron-LM (arXiv:1909.08053, appendix B) needs the same two kinds of random numbers and keeps a
    generator for each.

    Args:
        seed: A seed, the same on all ranks of a group; each stream needs another one.
        group: The ranks, which fork together; the current model-parallel group by default.

    Example:
        >>> tracker = RandomTracker(1)
        >>> with tracker.fork():
        ...     mask = torch.rand(3)
    """

    def __init__(self, seed: int, *, group: GroupLike = None) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            msg = f"seed must be a whole number, the same on all ranks, got {seed!r}"
            raise ConfigError(msg)
        self.group: Group = as_group(group)
        self.seed = seed
        self._forks: list[list[int]] = []  # per open fork: the number drawn, the `_shared` blocks

    @contextmanager
    def fork(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Draw this rank's own numbers in a ``with`` block; every rank of the group has to enter it.

        Args:
            device: The device. Its default generator is set for the block and restored afterwards.
        """
        place = torch.device(device)
        # Each rank takes this one number, whatever it draws inside: the shared generator stays in step, and
        # the next fork gets other masks (`dropout_differs_between_ranks_and_follows_torchs_generator`).
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        before = get_state(place, None)
        seed_device(place, mixed_seed(drawn, self.seed, self.group.rank))
        self._forks.append([drawn, 0])
        try:
            yield
        finally:
            self._forks.pop()
            set_state(before, place, None)

    @contextmanager
    def _shared(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Draw the same numbers on all ranks in a block inside a fork; outside a fork they do anyway."""
        if not self._forks:
            yield
            return
        place, fork = torch.device(device), self._forks[-1]
        before = get_state(place, None)
        fork[1] += 1
        seed_device(place, mixed_seed(fork[0] + fork[1], self.seed, -1))
        try:
            yield
        finally:
            set_state(before, place, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream, without the state of torch's default generator."""
        return {"rank": self.group.rank, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the stream of a tracker of this rank.

        Raises:
            StateError: The state is another rank's.
        """
        if state["rank"] != self.group.rank:
            msg = f"the random state is from rank {state['rank']}, and this is rank {self.group.rank}"
            raise StateError(msg)
        self.seed = state["seed"]


def mixed_seed(drawn: int, seed: int, rank: int) -> int:
    """Return the seed of a rank's own numbers; for rank -1, of the numbers that are the same on all ranks."""
    # The seed is a sum. With a factor of 1, rank 1 of seed 0 would draw the numbers of rank 0 of seed 1; a
    # large odd one (about 2**32 divided by the golden ratio) keeps neighboring seeds and ranks apart.
    return (drawn + seed + 0x9E3779B1 * (rank + 1)) % 2**63


def get_state(device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return device_rng_state(device)
    return generator.get_state()


def set_state(state: Tensor, device: torch.device, generator: torch.Generator | None) -> None:
    if generator is None:
        set_device_rng_state(device, state)
    else:
        generator.set_state(state)
