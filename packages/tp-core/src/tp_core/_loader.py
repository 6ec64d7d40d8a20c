"""Loaders that know the seed, the epoch, and which share of each batch is this rank's.

The order of the samples is a pure function of (seed, epoch): the sampler is asked for the epoch's
batches inside a random state made of the two, which then goes back to what it was. So every rank
sees the same batches, takes its share of each, and no rank has to tell another one how many
samples it has.
"""

import copy
import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tp_core._tree import tree_leaves
from tp_core.errors import LoaderError

__all__ = ["PreparedLoader", "Share", "count_samples", "seeded", "split_evenly"]

_TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True)
class Share:
    """How many samples of a global batch one data rank has.

    Attributes:
        samples: Samples of this rank; 0 for a stand-in that must not count.
        total: Samples of all data ranks together.
    """

    samples: int
    total: int


def split_evenly(length: int, parts: int) -> list[slice]:
    """Cut ``length`` into ``parts`` slices whose sizes differ by at most one, larger ones first.

    Example:
        >>> split_evenly(5, 2)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    size, extra = divmod(length, parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in ``batch`` that has a first dimension, else 1."""
    first = batch[0] if type(batch) in {tuple, list} and batch else batch
    if type(first) is torch.Tensor and first.dim() > 0:  # the common batch, at a third of the cost
        return first.size(0)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    return 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Run a block with Python's, numpy's (if loaded) and torch's CPU generators seeded by ``key``.

    The generators are put back as they were.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest) >> 1  # torch takes a signed 64-bit seed
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed the accelerators.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


class _EpochBatches:
    """A batch sampler that gives one rank its share of the epoch's batches."""

    def __init__(self, inner: Any, *, seed: int, rank: int, size: int, training: bool) -> None:
        self.inner = inner
        self.order: list[list[Any]] = []
        self.shares: deque[Share] = deque()
        self._seed, self._rank, self._size, self._training = seed, rank, size, training

    def __len__(self) -> int:
        return len(self.inner)

    def start(self, epoch: int) -> None:
        """Fix the order of the epoch that the next iteration yields."""
        _tell_epoch(self.inner, epoch)
        with seeded(self._seed, epoch):
            # The length bounds samplers that never end.
            self.order = [list(batch) for batch in islice(self.inner, len(self.inner))]

    def __iter__(self) -> Iterator[list[Any]]:
        self.shares.clear()
        known: dict[int, tuple[slice, Share]] = {}  # by the length of the batch; few differ
        for batch in self.order:
            total = len(batch)
            if total not in known:
                part = split_evenly(total, self._size)[self._rank]
                known[total] = part, Share(part.stop - part.start, total)
            part, share = known[total]
            if share.samples == 0:
                if not self._training:
                    continue
                # Every rank must take this step, or the others would wait for its gradients: a
                # stand-in sample, whose loss counts nothing.
                part = slice(1)
            self.shares.append(share)
            yield batch[part]


class PreparedLoader:
    """Yields one data rank's share of every batch of a loader, moved to its device.

    Each new iteration is the next epoch, unless :meth:`set_epoch` says which one. The loader that
    the user gave keeps all its options and is not changed.

    Attributes:
        loader: The user's loader.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        training: bool = True,
        shard: bool = True,
        move: Callable[[Any], Any] | None = None,
        on_share: Callable[[Share | None], None] | None = None,
        agree: Callable[[str, object], None] | None = None,
        collate: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]] | None = None,
    ) -> None:
        """Prepare ``loader``.

        Args:
            loader: A ``DataLoader``, or with one data rank any iterable of batches.
            seed: Orders the samples, together with the epoch.
            rank: The data rank whose share it is.
            size: The number of data ranks.
            training: Whether a rank without samples of a batch gets a stand-in, or skips it.
            shard: Whether batches are split over the data ranks.
            move: Moves a batch to the device; ``None`` leaves it where it is.
            on_share: Is told the share of each batch before it is yielded.
            agree: ``agree(what, value)`` raises unless all ranks have the same value.
            collate: Turns the loader's collate function into the one to use.

        Raises:
            LoaderError: The loader cannot be iterated, or not be split over the ranks.
        """
        if not isinstance(loader, Iterable):
            msg = f"a loader must be iterable, got {type(loader).__name__}: {loader!r}"
            raise LoaderError(msg)
        self.loader = loader
        self._epoch = 0
        self._move = move
        self._on_share = on_share
        self._agree = agree if shard else None
        self._size = size
        self._batches: _EpochBatches | None = None
        self._source = loader
        if not shard or not _is_indexed(loader):
            if shard and size > 1:
                raise LoaderError(_cannot_shard(loader, size))
            return
        if size > 1 and isinstance(loader.sampler, DistributedSampler):
            msg = (
                "the loader's DistributedSampler already splits the data over the ranks, and the "
                "backend would split it again; give a plain loader (shuffle=True), or say "
                "shard=False"
            )
            raise LoaderError(msg)
        self._batches = _EpochBatches(
            loader.batch_sampler, seed=seed, rank=rank, size=size, training=training
        )
        self._source = _copy_loader(loader, self._batches, collate)
        if self._agree is not None:
            self._agree("the number of batches of a loader", len(self._batches))

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            LoaderError: The user's loader has no length.
        """
        source = self.loader if self._batches is None else self._batches
        if isinstance(source, Sized):
            try:
                return len(source)
            except TypeError:  # a DataLoader over an iterable dataset without length
                pass
        msg = (
            f"the loader ({type(self.loader).__name__}) has no length; say how many batches make "
            "an epoch: steps_per_epoch=..."
        )
        raise LoaderError(msg)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._batches is None:
            return self._iterate_foreign(epoch)
        return self._iterate_ours(epoch, self._batches)

    def _iterate_ours(self, epoch: int, batches: _EpochBatches) -> Iterator[Any]:
        """Yield from a loader whose batches are chosen by us."""
        move, on_share = self._move, self._on_share
        batches.start(epoch)
        if self._agree is not None and not _order_is_ours(batches.inner):
            self._agree(f"the order of the samples in epoch {epoch}", _digest(batches.order))
        shares = batches.shares
        for batch in self._source:
            share = shares.popleft()
            if on_share is not None:
                on_share(share)
            yield batch if move is None else move(batch)

    def _iterate_foreign(self, epoch: int) -> Iterator[Any]:
        """Yield from a loader whose batches are not ours to choose: its samples are counted."""
        move, on_share = self._move, self._on_share
        _tell_epoch(self.loader, epoch)
        share = Share(0, 0)
        for batch in self._source:
            if on_share is not None:
                # The other ranks' counts are not known here: theirs are taken to be the same.
                samples = count_samples(batch)
                if samples != share.samples:
                    share = Share(samples, samples * self._size)
                on_share(share)
            yield batch if move is None else move(batch)


def _tell_epoch(holder: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader or batch sampler, and of its sampler, where there is one."""
    for listener in (holder, getattr(holder, "sampler", None)):
        if listener is not None and hasattr(listener, "set_epoch"):
            listener.set_epoch(epoch)


def _is_indexed(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` takes batches of indices, so that we can choose them."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )


def _copy_loader(
    loader: DataLoader[Any],
    batches: _EpochBatches,
    collate: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]] | None,
) -> DataLoader[Any]:
    """Copy a loader with other batches: whatever its class and options, all else stays.

    Building a new one from its arguments would lose those that torch has no attribute for and
    those of subclasses.
    """
    copied = copy.copy(loader)
    # DataLoader refuses these by assignment once it is initialised.
    copied.__dict__["batch_sampler"] = batches
    copied.__dict__["_iterator"] = None  # a persistent iterator belongs to the original
    if collate is not None:
        copied.__dict__["collate_fn"] = collate(loader.collate_fn)
    return copied


def _order_is_ours(batch_sampler: Any) -> bool:
    """Whether the order follows from the seed and epoch alone, with nothing of the user's in it."""
    sampler = getattr(batch_sampler, "sampler", None)
    return (
        type(batch_sampler) is BatchSampler
        and type(sampler) in _TORCH_SAMPLERS
        and getattr(sampler, "generator", None) is None
    )


def _digest(batches: list[list[Any]]) -> str:
    return hashlib.blake2b(repr(batches).encode(), digest_size=8).hexdigest()


def _cannot_shard(loader: object, size: int) -> str:
    what = type(loader).__name__
    if isinstance(loader, DataLoader):
        what += f" over {type(loader.dataset).__name__}"
        if loader.batch_sampler is None:
            what += " with batch_size=None"
    return (
        f"the batches of a loader without sample indices ({what}) cannot be split over {size} "
        "ranks; give a DataLoader over a dataset with length and a batch size, or give each rank "
        "its own samples (data_rank, data_size) and say shard=False"
    )
