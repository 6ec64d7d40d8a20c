"""Batches: how the samples of the global order become the batches of steps, and rows of them a rank's part.

A batcher sees the samples in the global order, by their positions, and never their content. It makes the
global batch of one step after the other, the same whatever the number of ranks::

    the global order       0 1 2 3 | 4 5 6 7 | 8 9 ...      Item: a position and a cost
    next_batch             [row, row, row, row]             SampleRow: one sample, or pieces of several
    split, 2 ranks         [row, row] [row, row]
    collate, in a worker   a batch of this rank's rows
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.utils.data import default_collate
from tp_core.arguments import explain_init
from tp_core.data import split_evenly
from tp_core.errors import ConfigError, LoaderError


class Item(NamedTuple):
    """A sample in the global order of an epoch.

    Attributes:
        position: Its place in the order, from 0.
        cost: What `Batcher.cost` says of it; 1 without one.
    """

    position: int
    cost: int = 1


class Piece(NamedTuple):
    """A part of a sample, in a row.

    Attributes:
        position: The sample's place in the global order.
        start: The first token of it, or whatever the batcher counts.
        stop: The end of the part; ``None`` for the sample's end.
    """

    position: int
    start: int = 0
    stop: int | None = None


class UnfitSampleError(LoaderError):
    """A sample that no batch can have. The loader adds the file and the offset."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position


class SampleRow(NamedTuple):
    """One row of a batch.

    Attributes:
        pieces: The samples in it, or parts of them.
        weight: What the row counts; 0 for one that only fills up.
    """

    pieces: tuple[Piece, ...]
    weight: float = 1.0


class WholeSamples(Sequence[SampleRow]):
    """Rows of one whole sample each, at positions one behind the other, made when they are looked at.

    Most batches are such ones, and a row for each of their samples would cost as much as reading it.
    """

    __slots__ = ("positions",)

    def __init__(self, positions: range) -> None:
        self.positions = positions

    def __reduce__(self) -> tuple[type["WholeSamples"], tuple[range]]:
        return WholeSamples, (self.positions,)  # quickly: one goes to a worker for each batch

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> SampleRow: ...
    @overload
    def __getitem__(self, index: slice) -> "WholeSamples": ...
    def __getitem__(self, index: int | slice) -> "SampleRow | WholeSamples":
        if isinstance(index, slice):
            return WholeSamples(self.positions[index])
        return SampleRow((Piece(self.positions[index]),))


class ItemsInOrder(Iterator[Item]):
    """The samples from a position on, where they have no costs.

    Attributes:
        positions: Those that were not taken yet.
    """

    def __init__(self, positions: range) -> None:
        self.positions = positions

    def __next__(self) -> Item:
        taken = self.take(1)
        if not taken:
            raise StopIteration
        return Item(taken[0])

    def take(self, number: int) -> range:
        """Return the positions of this many samples, or of those that are left."""
        taken, self.positions = self.positions[:number], self.positions[number:]
        return taken


class Batcher:
    """Makes global batches of samples; a subclass decides which samples make a batch.

    A loader works on a shallow copy for each iteration, and sends copies to its workers, so a batcher can be
    pickled. What it does must follow from the items alone: every rank makes the same batches.

    Attributes:
        cost: The cost of a sample, such as its number of tokens; ``None`` where batches do not depend on the
            samples. It runs where samples are loaded, in the workers.
    """

    cost: Callable[[Any], int] | None = None

    def start(self, state: Mapping[str, Any] | None, take: Callable[[Sequence[int]], list[Item]]) -> None:
        """Begin an epoch, or continue one.

        Args:
            state: The result of :meth:`state_dict`; ``None`` at the beginning.
            take: ``take(positions)`` returns the items at positions that were taken before.
        """

    def next_batch(self, items: Iterator[Item]) -> Sequence[SampleRow] | None:
        """Return the rows of the next global batch; ``None`` at the end of the epoch.

        Args:
            items: The samples that were not taken yet, in the global order.
        """
        raise NotImplementedError

    def split(self, rows: Sequence[SampleRow], ranks: int) -> Sequence[Sequence[SampleRow]]:
        """Return the part of each rank of a global batch.

        Together they are all rows, in their order. A part may be empty.
        """
        return [rows[part] for part in split_evenly(len(rows), ranks)]

    def count(self, rows: Sequence[SampleRow]) -> int:
        """Return what rows weigh in the mean over all ranks: the number of rows."""
        return len(rows)

    def collate(self, rows: Sequence[SampleRow], samples: Mapping[int, Any]) -> Any:
        """Return the batch of a rank's rows. It runs in a worker.

        Args:
            rows: The rows of one rank, at least one.
            samples: The samples in them, by their positions, in the order of the rows.
        """
        raise NotImplementedError

    def measure(self, batch: Any) -> dict[str, float]:  # noqa: ARG002 - the contract
        """Return numbers of a batch that add up, such as its tokens, for `Loader.stats`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what is held back for later batches, as positions and numbers: it becomes JSON."""
        return {}

    def length(self, samples: int) -> int | None:  # noqa: ARG002 - the contract
        """Return the number of batches that this many samples make; ``None`` where that is not known."""
        return None


@explain_init
class BatchSize(Batcher):
    """Batches of this many samples, over all ranks together.

    Example:
        >>> BatchSize(64, last="drop").length(1000)
        15
    """

    def __init__(
        self,
        size: int,
        *,
        last: Literal["spread", "drop", "pad"] = "spread",
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Set the size.

        Args:
            size: The samples of a step, on all ranks together.
            last: What becomes of the samples that are left at the end: ``"spread"`` divides them among the
                ranks, ``"drop"`` leaves them out, and ``"pad"`` fills up the batch with rows that count
                nothing. Then each sample must be a dict, and each batch has a ``"weight"`` for each row.
            collate: Makes a batch of a list of samples.

        Raises:
            ConfigError: The size is not a number above 0, or ``last`` is none of these.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            msg = f"a batch needs a number of samples above 0, for all ranks together, got {size!r}"
            raise ConfigError(msg)
        if last not in ("spread", "drop", "pad"):
            msg = f"last={last!r}: the last samples of an epoch can be 'spread', 'drop' or 'pad'"
            raise ConfigError(msg)
        self.size, self.last, self._collate = size, last, collate

    def next_batch(self, items: Iterator[Item]) -> Sequence[SampleRow] | None:
        """Return the next samples, each a row."""
        rows: Sequence[SampleRow]
        if isinstance(items, ItemsInOrder):
            rows = WholeSamples(items.take(self.size))
        else:
            rows = [SampleRow((Piece(item.position),)) for item in islice(items, self.size)]
        if not rows or (len(rows) < self.size and self.last == "drop"):
            return None
        if self.last == "pad" and len(rows) < self.size:
            more = self.size - len(rows)
            rows = [*rows, *(SampleRow(rows[i % len(rows)].pieces, weight=0.0) for i in range(more))]
        return rows

    def collate(self, rows: Sequence[SampleRow], samples: Mapping[int, Any]) -> Any:
        """Return the batch of a rank's samples.

        Raises:
            ConfigError: Rows that count nothing are asked for, and the samples are not dicts.
        """
        if isinstance(rows, WholeSamples):
            chosen = list(samples.values())
        else:
            chosen = [samples[row.pieces[0].position] for row in rows]
        batch = self._collate(chosen)
        if self.last != "pad":
            return batch
        if not isinstance(batch, dict):
            msg = (
                "last='pad' puts a 'weight' for each row into the batch, so a batch must be a dict, got "
                f"{type(batch).__name__}; return dicts as samples, or take last='spread' or 'drop'"
            )
            raise ConfigError(msg)
        return {**batch, "weight": torch.tensor([row.weight for row in rows])}

    def length(self, samples: int) -> int:
        """Return the number of batches of an epoch."""
        if self.last == "drop":
            return samples // self.size
        return -(-samples // self.size)


def positions_in(rows: Iterable[SampleRow]) -> Sequence[int]:
    """Return the positions of the samples in rows, each one once."""
    if isinstance(rows, WholeSamples):
        return rows.positions
    return list(dict.fromkeys(piece.position for row in rows for piece in row.pieces))
