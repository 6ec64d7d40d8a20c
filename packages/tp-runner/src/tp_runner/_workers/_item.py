"""Which item a worker is at, and the random numbers that are that item's own."""

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tp_core.internal import seed_of

from tp_runner._options import Settings

if TYPE_CHECKING:
    import random

    import numpy as np
    import torch

__all__ = ["ItemInfo", "ItemRng", "Task", "at_work", "item", "work_here"]

_OWN = 1  # in the key of an item's seed: the global generators begin with the one that lacks it


class ItemRng:
    """Generators of one item's own, made when they are asked for, all with the item's seed.

    For one on another device: ``torch.Generator(device).manual_seed(tp_runner.item().seed)``.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @functools.cached_property
    def random(self) -> "random.Random":
        """Python's."""
        import random

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
    """The item, or the batch, that a worker is at.

    Attributes:
        index: Its place in the input, from 0; of a batch, that of its first item.
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
        """Whether nobody wants the result any more: its stream was closed, cancelled or has failed.

        On Ray it is always false: an actor hears of nothing while it works.
        """
        return self._is_cancelled()


class Task:
    """What one worker is at: the chunk, and by its board the place in it.

    Args:
        settings: How the runner is run.
        board: What the parent looks at while the worker works: the second word becomes the place in the chunk
            of the item at work, the third one the time at which it began, in nanoseconds.
        cancelled: The numbers of runs whose results nobody wants any more.
        seeds_globals: Whether the generators of Python, numpy and torch are this worker's own to seed.

    Attributes:
        global_seed: What they are seeded with, beside each item's place; ``None`` for not at all.
        start: The place of the chunk's first item in the input.
        was_asked: Whether the work has asked which item it is at.
    """

    def __init__(
        self,
        settings: Settings,
        board: MutableSequence[int],
        cancelled: Container[int],
        *,
        seeds_globals: bool = True,
    ) -> None:
        self.board = board
        self.timeout_s = settings.timeout_s
        self.batching = settings.batching
        self.global_seed = settings.seed if seeds_globals else None
        self._seed = settings.seed
        self.start = 0
        self.was_asked = False
        self._entropy = settings.entropy
        self._cancelled = cancelled
        self._run = self._attempt = 0
        self._is_at_work = False
        self._item: ItemInfo | None = None

    def begin(self, start: int, run: int, attempt: int) -> None:
        """Note which chunk is next."""
        self.start, self._run, self._attempt = start, run, attempt
        self._item, self._is_at_work = None, True

    def end(self) -> None:
        """Note that no item is worked on."""
        self._item, self._is_at_work = None, False

    def is_cancelled(self) -> bool:
        """Whether nobody wants the results of this chunk any more."""
        return self._run in self._cancelled

    def item(self) -> ItemInfo | None:
        """Return the item at work; the same object as long as it is the same item."""
        if not self._is_at_work:
            return None
        self.was_asked = True
        index = self.start + self.board[1]
        if self._item is None or self._item.index != index:
            key = (self._entropy, self._run) if self._seed is None else (self._seed,)
            seed = seed_of((*key, index, _OWN))
            deadline = None if self.timeout_s is None else self.board[2] / 1e9 + self.timeout_s
            run, cancelled = self._run, self._cancelled
            self._item = ItemInfo(
                index, self._attempt, seed, ItemRng(seed), deadline, lambda: run in cancelled
            )
        return self._item


_of_process: Task | None = None
_of_thread = threading.local()


def item() -> ItemInfo | None:
    """Return which item the worker that the caller runs in is at; ``None`` where there is none.

    Example:
        >>> def noisy(x):
        ...     return x + tp_runner.item().rng.random.random()
        >>> noise = [list(tp_runner.map(noisy, [0, 0], seed=1, n_workers=n, engine="thread")) for n in (1, 2)]
        >>> noise[0] == noise[1]
        True
    """
    task: Task | None = getattr(_of_thread, "task", None) or _of_process
    return None if task is None else task.item()


def work_here(task: Task, *, of_process: bool = False) -> None:
    """Have :func:`item` answer by a task in this thread, or in all threads of a worker process."""
    global _of_process  # noqa: PLW0603 - it is about the process
    if of_process:
        _of_process = task
    else:
        _of_thread.task = task


@contextlib.contextmanager
def at_work(task: Task) -> Iterator[None]:
    """Do so for a while, in a thread that is no worker, or one in the midst of another's item."""
    before = getattr(_of_thread, "task", None)
    _of_thread.task = task
    try:
        yield
    finally:
        _of_thread.task = before
