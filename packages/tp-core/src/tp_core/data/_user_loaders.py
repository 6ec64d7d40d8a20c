"""Inspection of a user's loader, and copies of it with other batches."""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, SupportsFloat, TypeGuard

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tp_core._contracts._batch import Parts, Share
from tp_core.data._batches import EpochBatches

_MOST_COMPARED = 65_536
_TORCH_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ElasticLoader(Protocol):
    """A loader that divides its batches over the ranks itself, and has the same position on all of them.

    A session asks it for the loader of its rank. Its states are loaded on any number of ranks. If its
    ``len()`` raises ``TypeError``, it is a stream: an epoch is a number of batches, and no new beginning.

    Attributes:
        share: The samples that this rank, and all ranks, have of the batch that was yielded last.
        number: The number of that batch in its pass, among those of all ranks.
    """

    share: Share | None
    number: int

    def for_rank(self, rank: int, size: int, *, stand_ins: bool = True) -> "ElasticLoader":
        """Return a loader of a rank's parts, with a position of its own.

        Args:
            rank: The data rank.
            size: The number of data ranks.
            stand_ins: Whether a rank without a sample of a batch gets another rank's, with a share of 0, so
                that all take the same steps; else it has no such batch.
        """

    def set_epoch(self, epoch: int) -> None:
        """Set the pass of the next iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch that was yielded last."""

    def load_state_dict(self, state: Any) -> None:
        """Make the next iteration continue from a position."""

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or continue one after :meth:`load_state_dict`."""


class PartsOfElastic:
    """An elastic loader's batches in parts, one for each device of this rank.

    To the loader, each device is a rank: so the parts are as balanced as it balances ranks.
    """

    def __init__(self, loader: ElasticLoader, rank: int, size: int, *, parts: int, stand_ins: bool) -> None:
        self._parts = [loader.for_rank(rank * parts + i, size * parts) for i in range(parts)]
        self._stand_ins = stand_ins
        self.share: Share | None = None
        self.number = -1

    def set_epoch(self, epoch: int) -> None:
        for loader in self._parts:
            loader.set_epoch(epoch)

    def batches_in(self, epoch: int) -> int:
        return batches_in(self._parts[0], epoch)

    def __len__(self) -> int:
        return len(self._parts[0])  # type: ignore[arg-type]  # raises TypeError, as a stream's does

    def measured(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for loader in self._parts:
            for name, value in getattr(loader, "measured", dict)().items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def state_dict(self) -> dict[str, Any]:
        return self._parts[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        for loader in self._parts:
            loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Parts]:
        for batches in zip(*self._parts, strict=True):
            shares = [loader.share or Share(1, 1) for loader in self._parts]
            counts = [share.samples for share in shares]
            self.share, self.number = Share(sum(counts), shares[0].total), self._parts[0].number
            filled = [i for i, count in enumerate(counts) if count]
            if filled or self._stand_ins:
                filled = filled or [0]
                yield Parts([batches[i] for i in filled], counts=[max(counts[i], 1) for i in filled])


def is_elastic(loader: object) -> TypeGuard[ElasticLoader]:
    """Return whether a loader divides its batches over the ranks itself, or is the parts of one."""
    return isinstance(loader, PartsOfElastic) or callable(getattr(loader, "for_rank", None))


def batches_in(loader: Any, epoch: int) -> int:
    """Return the number of batches of an epoch, in which those of some elastic loaders differ."""
    own = getattr(loader, "batches_in", None)
    if own is None:
        return len(loader)
    return int(own(epoch))


def position_holder(loader: object) -> Any:
    """Return the loader, or its dataset, if that has a ``state_dict`` of its own position; else ``None``.

    The dataset of a loader with workers does not count: only its copies in the workers know the position.
    """
    holders = [loader]
    if isinstance(loader, DataLoader) and loader.num_workers == 0:
        holders.append(loader.dataset)
    for holder in holders:
        if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
            return holder
    return None


def is_indexed(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether ``loader`` takes batches of indices, so that tp can choose them."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )


def copy_loader(
    loader: DataLoader[Any],
    batches: EpochBatches | None,
    collate: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]] | None,
) -> DataLoader[Any]:
    """Return a copy of a loader, with other batches or its own; its class and all options stay.

    A new one, built from the arguments, would lose those without an attribute and those of subclasses.
    """
    copied = copy.copy(loader)
    # Past __setattr__: DataLoader refuses to assign these once it is initialized.
    if batches is not None:
        copied.__dict__["batch_sampler"] = batches
    copied.__dict__["_iterator"] = None  # a persistent iterator belongs to the original
    if keeps_old_epochs(loader):
        copied.__dict__["persistent_workers"] = False
    if collate is not None:
        copied.__dict__["collate_fn"] = collate(loader.collate_fn)
    return copied


def keeps_old_epochs(loader: DataLoader[Any]) -> bool:
    """Return whether workers stay with a copy of the dataset that no later call of its set_epoch reaches."""
    return loader.persistent_workers and hasattr(loader.dataset, "set_epoch")


def is_hugging_face(dataset: object) -> bool:
    """Return whether a dataset is an iterable one of Hugging Face's ``datasets``."""
    datasets = sys.modules.get("datasets")  # a program that made one has imported it
    kind = getattr(datasets, "IterableDataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def order_is_ours(batch_sampler: Any) -> bool:
    """Return whether the order follows from seed and epoch alone: no sampler or generator of the user's."""
    sampler = getattr(batch_sampler, "sampler", None)
    return (
        type(batch_sampler) is BatchSampler
        and type(sampler) in _TORCH_SAMPLERS
        and getattr(sampler, "generator", None) is None
    )


def drawing(loader: DataLoader[Any]) -> str:
    """Return a description of the samples that a loader draws, equal on all ranks that share its batches.

    Example:
        >>> drawing(DataLoader([10, 11, 12], batch_size=2))
        '3 samples of list by SequentialSampler and BatchSampler'
    """
    dataset, batches = loader.dataset, loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(dataset, Sized):
        number = f"{len(dataset)} samples"
    else:
        number = "samples"
    kinds = " and ".join(type(each).__name__ for each in (sampler, batches) if each is not None)
    picked = [*_indices_in(dataset)]
    if isinstance(sampler, SubsetRandomSampler):
        picked.append(sampler.indices)
    elif isinstance(sampler, WeightedRandomSampler):
        picked.append(sampler.weights.tolist())
    digests = "".join(f", indices or weights {_digest(values)}" for values in picked)
    return f"{number} of {type(dataset).__name__} by {kinds}{digests}"


def _indices_in(dataset: Any) -> Iterator[Sequence[Any]]:
    """Yield the indices of each subset in a dataset, as `random_split` picks them."""
    while isinstance(dataset, Subset):
        yield dataset.indices
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _indices_in(part)


def _digest(values: Sequence[Any]) -> str:
    some = values[:: len(values) // _MOST_COMPARED + 1]  # enough to distinguish two random choices
    text = ",".join(
        f"{float(value):.7g}" if isinstance(value, SupportsFloat) else repr(value) for value in some
    )
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def cannot_shard(loader: object, size: int) -> str:
    kind = type(loader).__name__
    if isinstance(loader, DataLoader):
        kind += f" over {type(loader.dataset).__name__}"
        if loader.batch_sampler is None:
            kind += " with batch_size=None"
    return (
        f"the batches of a loader without sample indices ({kind}) cannot be split over {size} "
        "ranks; give a DataLoader with a batch size over a dataset with length, or over an iterable one with "
        "shard(index, count), which returns the part that no other index has; or give each rank its own "
        "samples (data_rank, data_size) and call prepare(loader, shard=False)"
    )


def iterates_itself(loader: Iterable[Any]) -> bool:
    """Return whether a loader's class has its own ``__iter__``, which may skip batches or repeat them."""
    own = type(loader).__iter__
    return own is not DataLoader.__iter__ and not getattr(own, "__module__", "").startswith("torchdata.")
