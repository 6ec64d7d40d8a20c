"""What the work may ask of its worker and of its item, as values for users."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker among those of its runner.

    Attributes:
        number: Its number, from 0.
        count: How many workers there are.
        device: Its device, as a string such as "cuda:0" or "cpu".
        seed: The runner's ``seed``; ``None`` without one.
    """

    number: int
    count: int
    device: str
    seed: int | None


class ItemRng:
    """The random generators of one item, made at their first use, all with the item's seed.

    For one on another device: ``torch.Generator(device).manual_seed(tp_runner.item().seed)``.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @functools.cached_property
    def random(self) -> random.Random:
        """Python's."""
        return random.Random(self._seed)  # noqa: S311 - work's own numbers

    @functools.cached_property
    def numpy(self) -> "np.random.Generator":
        """Numpy's."""
        import numpy as np

        return np.random.default_rng(self._seed)

    @functools.cached_property
    def torch(self) -> "torch.Generator":
        """torch's, on the CPU."""
        import torch

        return torch.Generator().manual_seed(self._seed)


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """The item, or the batch, at work in a worker.

    Attributes:
        index: Its place in the input, from 0; for a batch, the place of its first item.
        attempt: How often it was sent to a worker before, and may have been worked on: 0 the first time.
        seed: A number of its own. With the runner's ``seed`` it depends on that and the place alone, whatever
            the engine and the number of workers; without, it is another one in each stream, and the same in
            each attempt.
        rng: Generators that begin with that seed.
        deadline: When ``timeout_s`` ends it, by ``time.monotonic()``; ``None`` without a limit.
    """

    index: int
    attempt: int
    seed: int
    rng: ItemRng
    deadline: float | None
    _is_cancelled: Callable[[], bool] = field(repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """``True`` once nobody wants the result: its stream was closed, cancelled or has failed.

        On Ray it is always false: an actor receives no messages while it works.
        """
        return self._is_cancelled()
