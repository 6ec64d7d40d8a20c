"""The batches of one epoch, in an order that depends on (seed, epoch) only, and one rank's share of each."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.data import BatchSampler, get_worker_info

from tp_core._contracts._batch import Parts, Share
from tp_core._transfer import recursive_pin
from tp_core._trees import tree_leaves
from tp_core.data._rows import is_array, length_along
from tp_core.errors import LoaderError
from tp_core.output import get_logger
from tp_core.random import seed_generators, seeded, seeded_own

log = get_logger("tp_core")


def split_evenly(length: int, parts: int) -> list[slice]:
    """Cut ``length`` into ``parts`` slices with sizes that differ by at most one, larger ones first.

    Example:
        >>> split_evenly(5, 2)
        [slice(0, 3, None), slice(3, 5, None)]
    """
    size, extra = divmod(length, parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(bounds)]


class _Batch(list[Any]):
    """The indices of one batch; a loader's worker seeds its generators when it begins to load them.

    So a worker's random numbers depend on the seed, the epoch and the batch, and not on the batches that
    it loaded before. They are the same when an epoch is resumed in its middle.
    """

    key: tuple[int, ...]

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            seed_generators(self.key)
        return super().__iter__()


class EpochBatches:
    """A batch sampler that gives one rank its share of the epoch's batches.

    In evaluation a batch of torch's own sampler that has fewer samples than there are ranks is joined to
    those before it. So every rank has a sample of each batch, and no rank needs a stand-in. A batch of
    another sampler is skipped by ranks without a sample, unless ``stand_ins`` gives them one, too.
    """

    def __init__(
        self, inner: Any, *, seed: int, rank: int, size: int, training: bool, stand_ins: bool = False
    ) -> None:
        self.inner = inner
        self.seed = seed
        self.order: list[list[Any]] = []
        self.shares: deque[tuple[int, Share]] = deque()  # of the newest iteration, with each batch's number
        # The order of each epoch that has begun: an evaluation may iterate the same loader within an epoch.
        self._begun: dict[int, list[list[Any]]] = {}
        self._first = 0
        self._epoch = 0
        self._digest = ""
        self._was_asked = False  # whether it has more batches than it says
        self._is_found = False  # by `find`, and not iterated yet
        self._rank, self._size, self._training = rank, size, training
        self._stand_ins = training or stand_ins

    @property
    def _joins(self) -> bool:
        return not self._training and self._size > 1 and type(self.inner) is BatchSampler

    def __len__(self) -> int:
        if not self._joins:
            return len(self.inner)
        sampler, size = self.inner, self.inner.batch_size
        full, rest = divmod(len(sampler.sampler), size)
        last = [] if sampler.drop_last or not rest else [rest]
        return len(_joined_ends([size] * full + last, self._size))

    def start(self, epoch: int, *, first: int = 0) -> None:
        """Fix the order of the epoch that the next iteration yields, from batch ``first`` on."""
        self._first = first
        if self._is_found and epoch == self._epoch:
            self._is_found = False  # a sampler that counts its iterations would give the next order
            return
        call_set_epoch(self.inner, epoch)
        own = getattr(getattr(self.inner, "sampler", None), "generator", None)
        with seeded(self.seed, epoch), seeded_own(own, self.seed, epoch):
            # islice: a sampler may never end.
            batches = iter(self.inner)
            self.order = [list(batch) for batch in islice(batches, len(self.inner))]
            if not self._was_asked:
                self._warn_of_more(batches)
        if self._joins:
            ends = [0, *_joined_ends(list(map(len, self.order)), self._size)]
            self.order = [list(chain.from_iterable(self.order[a:b])) for a, b in pairwise(ends)]
        self._epoch, self._digest, self._is_found = epoch, "", False

    def _warn_of_more(self, batches: Iterator[Any]) -> None:
        """Warn, once, that a sampler yields more batches than its length: no epoch has the others."""
        self._was_asked = True
        if next(batches, None) is None:
            return
        number, sampler = len(self.order), self.inner
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        log.warning(
            "the loader has more than the %d batches that its len() says, and each epoch ends after %d of "
            "them: the samples of all others are left out; correct __len__ of %s",
            number,
            number,
            type(sampler).__name__,
        )

    @property
    def digest(self) -> str:
        if not self._digest:
            self._digest = _digest_of(self.order)
        return self._digest

    @property
    def is_training(self) -> bool:
        return self._training

    @property
    def is_begun(self) -> bool:
        """Whether an iteration has not ended."""
        return bool(self._begun)

    def begin(self, epoch: int) -> None:
        """Record that an iteration over an epoch begins; its order is kept while others are iterated."""
        self._begun[epoch] = self.order

    def end(self, epoch: int) -> None:
        """Record that the iteration over an epoch has ended, or was dropped."""
        self._begun.pop(epoch, None)

    def order_of(self, epoch: int) -> list[list[Any]]:
        """Return the order of an epoch in progress, or of the last one."""
        return self._begun.get(epoch, self.order)

    def digest_of(self, epoch: int) -> str:
        order = self.order_of(epoch)
        if order is self.order:
            return self.digest
        return _digest_of(order)

    def find(self, epoch: int, samples: int, *, order: str | None = None) -> int:
        """Return how many batches of the epoch hold its first ``samples`` samples."""
        self.start(epoch)
        self._is_found = True
        ends = list(accumulate(map(len, self.order), initial=0))
        if samples not in ends:
            msg = (
                f"sample {samples} of epoch {epoch}, where the checkpoint stands, is not the end of a "
                f"batch of this loader (its first batches end at {ends[1:4]}); give the loader the "
                "batch size and the sampler that it had"
            )
            raise LoaderError(msg)
        if samples and order is not None and order != self.digest:
            msg = (
                f"the loader's sampler gives epoch {epoch} another order than when it stood at sample "
                f"{samples} of it, so it cannot resume there; let the order follow from the epoch "
                "(set_epoch) or from torch's, numpy's or Python's generator, which are seeded for it, or "
                "resume from the end of an epoch"
            )
            raise LoaderError(msg)
        return ends.index(samples)

    def __iter__(self) -> Iterator[list[Any]]:
        shares: deque[tuple[int, Share]] = deque()
        self.shares = shares
        return self._batches_of(self._epoch, self.order, self._first, shares)

    def _batches_of(
        self, epoch: int, order: list[list[Any]], first: int, shares: deque[tuple[int, Share]]
    ) -> Iterator[list[Any]]:
        parts: dict[int, tuple[slice, Share]] = {}  # by the length of the batch; few differ
        for number in range(first, len(order)):
            batch = order[number]
            total = len(batch)
            if total not in parts:
                part = split_evenly(total, self._size)[self._rank]
                parts[total] = part, Share(part.stop - part.start, total)
            part, share = parts[total]
            if share.samples == 0:
                if not self._stand_ins:
                    continue
                # Every rank must take this step: the others would wait for its gradients without an end.
                # So it gets a stand-in sample, with a loss that counts nothing.
                part = slice(1)
            shares.append((number, share))
            own_batch = _Batch(batch[part])
            own_batch.key = (self.seed, epoch, number, self._rank)
            yield own_batch


def _digest_of(order: list[list[Any]]) -> str:
    samples = repr(list(chain.from_iterable(order)))
    return hashlib.blake2b(samples.encode(), digest_size=8).hexdigest()


def _joined_ends(sizes: list[int], least: int) -> list[int]:
    """Return the ends of groups of batches with at least ``least`` samples each, where there are this many.

    Example:
        >>> _joined_ends([8, 8, 1], 2), _joined_ends([1, 1, 1], 2), _joined_ends([1], 2)
        ([1, 3], [3], [1])
    """
    ends, samples = [], 0
    for i, size in enumerate(sizes, start=1):
        samples += size
        if samples >= least:
            ends.append(i)
            samples = 0
    if samples:
        ends = [*ends[:-1], len(sizes)]
    return ends


def call_set_epoch(holder: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader or batch sampler, and of its sampler, where there is one."""
    for listener in (holder, getattr(holder, "sampler", None)):
        if listener is not None and hasattr(listener, "set_epoch"):
            listener.set_epoch(epoch)


# -- Numbers of samples ---------------------------------------------------------------------------


class Envelope:
    """A batch on its way through a loader, with the number of samples that it was collated from.

    Not a tuple: torch's pinning would turn that into a plain list.
    """

    def __init__(self, batch: Any, samples: int) -> None:
        self.batch = batch
        self.samples = samples

    def pin_memory(self) -> "Envelope":
        return Envelope(recursive_pin(self.batch), self.samples)


class CountingCollate:
    """Collate function that counts its samples; a class, as a loader's workers get it by pickle."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> Envelope:
        return Envelope(self.collate_fn(items), len(items))


class CountedBatch(dict[str, Any]):
    """Named values of a batch that knows what its loss is a mean over.

    Where a step returns no "weight", `Trainer.fit` takes the batch's, and it calls :meth:`check` before
    the first step. A subclass overrides both.

    Example:
        >>> class Words(CountedBatch):
        ...     def weight(self):
        ...         return self["mask"].sum()
    """

    def weight(self) -> Tensor | float | None:
        """Return how many units (tokens, pixels) the loss is a mean over; ``None`` for samples."""
        return None

    def check(self, step: Callable[[Any, Any], Any], model: nn.Module) -> None:
        """Raise if the step would compute something wrong from batches like this one, on a prepared model."""


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in ``batch`` that has a first dimension, else 1.

    `Parts` have their own counts, and so has a batch in an `Envelope`.
    """
    kind = type(batch)
    if (kind is tuple or kind is list) and batch:
        first = batch[0]
    else:
        first = batch
    if type(first) is Tensor:  # the common batch, at a fifth of the cost
        try:
            return first.size(0)
        except IndexError:  # a scalar
            pass
    if isinstance(batch, Parts):
        return sum(batch.counts)
    if isinstance(batch, Envelope):
        return batch.samples
    lengths = (length_along(leaf) for leaf in tree_leaves(batch) if not is_array(leaf))
    return next((length for length in lengths if length is not None), 1)
