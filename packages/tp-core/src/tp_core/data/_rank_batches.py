"""One rank's batches of a loader, by the kind of the loader: indexed, a stream, or elastic.

The order of the samples of an indexed loader is a pure function of (seed, epoch): the sampler yields the
epoch's batches in a random state made of the two, which is restored afterwards. So every rank sees the same
batches and takes its share of each. No rank has to send its number of samples to another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler, default_collate

from tp_core._contracts._batch import Share
from tp_core.data._batches import EpochBatches, count_samples
from tp_core.data._scattering import has_fewer
from tp_core.data._streams import NOTHING, Stream, split_stream
from tp_core.data._user_loaders import (
    ElasticLoader,
    PartsOfElastic,
    batches_in,
    cannot_shard,
    copy_loader,
    drawing,
    is_elastic,
    is_indexed,
    iterates_itself,
    order_is_ours,
)
from tp_core.data._workers import iterate_seeded
from tp_core.errors import LoaderError
from tp_core.output import get_logger

log = get_logger("tp_core")

Move = Callable[[Any], Any]
Collate = Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]

_WHOLE_DATA = "tp splits the data over the ranks itself: give every rank the whole dataset, in the same order"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The data ranks that share the batches of a loader, and this one among them.

    Attributes:
        rank: The data rank.
        size: The number of data ranks.
        shard: Whether batches are split over them.
        training: Whether a rank without samples of a batch gets a stand-in.
        agree: ``agree(what, value, remedy=...)`` raises unless all ranks have the same value.
        any_rank: Returns whether something holds on any rank; given where ranks take the same steps in
            evaluation, too.
        gather: ``gather(value)`` returns the value of each rank.
    """

    rank: int = 0
    size: int = 1
    shard: bool = True
    training: bool = True
    agree: Callable[..., None] | None = None
    any_rank: Callable[[bool], bool] | None = None
    gather: Callable[[Any], list[Any]] | None = None

    def agree_on_data(self, what: str, value: object) -> None:
        """Check that all ranks have the same data, if it is split over them.

        Collective: with ``agree``, its all-gather of objects.
        """
        if self.shard and self.agree is not None:
            self.agree(what, value, remedy=_WHOLE_DATA)

    @property
    def skips_batches(self) -> bool:
        """Whether a rank skips batches of which it has no samples."""
        return not self.training and self.any_rank is None


class Progress(Protocol):
    """Where an iteration is: attributes of a `PreparedLoader`, which kinds of batches set."""

    number: int
    share: Share | None
    continues_stream: bool


class RankBatches(ABC):
    """One rank's share of every batch of a loader."""

    stream: Stream | None = None
    """The loader's own batches, where tp cannot choose them."""

    @abstractmethod
    def iterate(self, progress: Progress, epoch: int, *, first: int, move: Move | None) -> Iterator[Any]:
        """Return an iterator over an epoch's batches from ``first`` on; each is noted in ``progress``."""

    @abstractmethod
    def length(self, epoch: int) -> int:
        """Return the number of batches of an epoch.

        Raises:
            LoaderError: It is not known.
        """

    @abstractmethod
    def has_more(self, number: int) -> bool:
        """Return whether there is a batch after the one of ``number``, which was yielded last."""

    @abstractmethod
    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the position after so many batches of an epoch, besides these two numbers."""

    @abstractmethod
    def load_state_dict(
        self, state: Mapping[str, Any], *, seed: int, replay: bool, continues_stream: bool
    ) -> int:
        """Go to a position; return the number of batches of its epoch that are done."""

    def measured(self) -> dict[str, float]:
        """Return the sums that a loader has of this rank's batches."""
        return {}


def rank_batches(
    loader: Iterable[Any], ranks: Ranks, *, seed: int, collate: Collate | None, parts: int | None
) -> RankBatches:
    """Return the batches of a loader for one rank.

    Raises:
        LoaderError: The loader cannot be split over the ranks.

    Collective: with ``ranks.agree`` and ``ranks.gather``, their all-gathers of objects; none without.
    """
    if is_elastic(loader):
        return ElasticBatches(loader, ranks, seed=seed, parts=parts)
    if ranks.shard and is_indexed(loader):
        return IndexedBatches(loader, ranks, seed=seed, collate=collate)
    return StreamBatches(loader, ranks, seed=seed, collate=collate)


def n_samples(loader: object) -> int | None:
    """Return the number of samples of a loader's dataset; ``None`` where it is not known."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    return None


def _no_length(loader: Iterable[Any], why: str = "") -> LoaderError:
    msg = (
        f"the loader ({type(loader).__name__}) has no length{why}; give the number of batches that "
        "make an epoch: Limits(steps_per_epoch=...)"
    )
    return LoaderError(msg)


# -- Loaders of which tp chooses the samples of each batch ----------------------------------------


class IndexedBatches(RankBatches):
    """The batches of a ``DataLoader`` over a dataset with indices: tp chooses the samples of each."""

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, *, seed: int, collate: Collate | None) -> None:
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            # In one process, too: the sampler gives a share of the data, and the others would be lost.
            if isinstance(sampler, DistributedSampler) and max(ranks.size, sampler.num_replicas) > 1:
                msg = (
                    f"the loader's DistributedSampler already splits the data over {sampler.num_replicas} "
                    f"ranks, and the backend would split it again, over {ranks.size}; give a plain loader "
                    "(shuffle=True), or call prepare(loader, shard=False)"
                )
                raise LoaderError(msg)
        self._loader, self._ranks, self._seed = loader, ranks, seed
        self._sampler = EpochBatches(
            loader.batch_sampler,
            seed=seed,
            rank=ranks.rank,
            size=ranks.size,
            training=ranks.training,
            stand_ins=ranks.any_rank is not None,
        )
        self._source = copy_loader(loader, self._sampler, collate)
        # Whether a batch may have fewer samples than were chosen; not once a warning has said so. Torch's own
        # way to join samples leaves none out.
        dataset = getattr(loader, "dataset", None)
        is_torchs = loader.collate_fn is default_collate and not hasattr(dataset, "__getitems__")
        self._may_have_fewer = not is_torchs
        self._current: Iterator[Any] | None = None  # the current iteration of a class with its own __iter__
        ranks.agree_on_data("the number of batches of a loader", len(self._sampler))
        if ranks.size > 1:
            ranks.agree_on_data("what a loader draws", drawing(loader))

    def iterate(self, progress: Progress, epoch: int, *, first: int, move: Move | None) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Collective: with a sampler of the user's own, ``agree`` on the order, once before the first batch.
        """
        # Of the iteration around this one, if there is one: restored when this one has ended.
        before = progress.number, progress.share
        progress.number = first - 1
        return self._iterate(progress, epoch, first, move, before)

    def _iterate(
        self,
        progress: Progress,
        epoch: int,
        first: int,
        move: Move | None,
        before: tuple[int, Share | None],
    ) -> Iterator[Any]:
        batches = self._sampler
        batches.start(epoch, first=first)
        if not order_is_ours(batches.inner):
            self._ranks.agree_on_data(f"the order of the samples in epoch {epoch}", batches.digest)
        batches.begin(epoch)
        length, shares = len(batches.order), None
        has_own = iterates_itself(self._loader)
        try:
            dataset: Any = getattr(self._source, "dataset", None)
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            source = iterate_seeded(self._source, seed=self._seed, epoch=epoch, is_ours=True)
            self._current = source if has_own else None
            if has_own and self._ranks.size == 1:  # it may leave batches out, or repeat them
                yield from _counted(source, progress, first, move, BatchTotals(self._loader, self._ranks))
                return
            for batch in source:
                if shares is None:
                    shares = batches.shares
                if not shares:
                    msg = (
                        f"the loader, {type(self._loader).__name__}, has yielded more than the {length} "
                        "batches that its sampler gives: its own __iter__ repeats some, and which samples of "
                        "them are this rank's is not known; repeat samples in the sampler instead"
                    )
                    raise LoaderError(msg)
                progress.number, progress.share = shares.popleft()
                if self._may_have_fewer and has_fewer(batch, progress.share.samples):
                    self._may_have_fewer = False
                yield batch if move is None else move(batch)
            left_out = batches.shares if shares is None else shares
            if left_out:
                msg = (
                    f"the loader ended after {progress.number + 1} of {length} batches, without an error: "
                    "what loads a sample has raised StopIteration, as next() does on an iterator that has "
                    "ended, and torch takes that for the end of the data; look at the dataset's __getitem__ "
                    "and at collate_fn: give next() a default there"
                )
                raise LoaderError(msg)
        finally:
            self._current = None
            batches.end(epoch)
            if batches.is_begun:
                progress.number, progress.share = before

    def length(self, epoch: int) -> int:  # noqa: ARG002 - each epoch has as many
        try:
            return len(self._sampler)
        except TypeError as error:
            raise _no_length(self._loader) from error

    def has_more(self, number: int) -> bool:
        if self._current is not None:
            return next(self._current, NOTHING) is not NOTHING
        return len(self._sampler.order) > number + 1

    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:
        order = self._sampler.order_of(epoch)[:batches]
        state: dict[str, Any] = {"samples": sum(map(len, order)), "dataset": n_samples(self._loader)}
        if not order_is_ours(self._sampler.inner):
            state["order"] = self._sampler.digest_of(epoch)
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        seed: int,
        replay: bool,  # noqa: ARG002 - contract
        continues_stream: bool,  # noqa: ARG002 - contract
    ) -> int:
        self._seed = self._sampler.seed = seed
        return self._sampler.find(state["epoch"], state.get("samples", 0), order=state.get("order"))


# -- Loaders that choose their batches themselves -------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """What tells the number of samples in each batch of a ``DataLoader``."""

    samples: int
    batch_size: int
    drop_last: bool

    @classmethod
    def of(cls, loader: object) -> "BatchSizes | None":
        """Return the sizes of a loader's batches; ``None`` where a sampler of the user's own chooses them."""
        # With a batch sampler of the user's own it has no batch size.
        if not is_indexed(loader) or loader.batch_size is None or iterates_itself(loader):
            return None
        if not isinstance(loader.sampler, Sized):
            return None
        return cls(len(loader.sampler), loader.batch_size, loader.drop_last)

    @property
    def full(self) -> int:
        """The number of full batches."""
        return self.samples // self.batch_size

    def samples_in(self, number: int) -> int:
        if number < self.full:
            return self.batch_size
        is_last = number == self.full and not self.drop_last
        if is_last:
            return self.samples % self.batch_size
        return 0


class BatchTotals:
    """The samples that all ranks have of each batch, where every rank's loader chooses its own.

    Where they are not known, each rank is assumed to have as many as this one, and a batch that shows that
    it may be wrong is warned of, once.

    Attributes:
        is_alone: Whether this rank has every batch whole, so that its own samples are all.

    Collective: in the constructor, for training, one of ``ranks.gather``.
    """

    def __init__(self, loader: object, ranks: Ranks) -> None:
        self._ranks = ranks
        self.is_alone = ranks.size == 1
        self._sizes: Sequence[BatchSizes] = ()
        if not ranks.shard and ranks.training and ranks.gather is not None:
            everyones = ranks.gather(BatchSizes.of(loader))
            if None not in everyones:
                self._sizes = everyones
        self._full = min((sizes.full for sizes in self._sizes), default=0)
        self._full_total = sum(sizes.batch_size for sizes in self._sizes)
        self._usual: int | None = None  # the samples of the first batch
        self._warns = ranks.training and ranks.size > 1

    def of(self, number: int, samples: int) -> int:
        """Return the samples of all ranks in a batch of which this rank has ``samples``."""
        if self._sizes and samples == self._sizes[self._ranks.rank].samples_in(number):
            is_full = number < self._full
            return self._full_total if is_full else sum(each.samples_in(number) for each in self._sizes)
        self._usual = self._usual or samples
        if self._warns and samples != self._usual:
            self._warns = False
            log.warning(
                "a batch of this rank has %d samples, and its first one had %d: the rank's loader chooses "
                "its samples, and how many the other ranks have is not known, so each rank's mean counts the "
                "same. Return the number of samples from the step, as 'weight', or give each rank a "
                "DataLoader with a batch size over a dataset with a length",
                samples,
                self._usual,
            )
        return samples * self._ranks.size


def _counted(
    source: Iterator[Any],
    progress: Progress,
    first: int,
    move: Move | None,
    totals: BatchTotals,
    leave: Callable[[], None] | None = None,
) -> Iterator[Any]:
    """Yield batches that tp did not choose, with their samples counted; at the end call ``leave``."""
    share, is_alone = Share(0, 0), totals.is_alone
    try:
        for number, batch in enumerate(source, start=first):
            samples = count_samples(batch)
            if samples != share.samples or not is_alone:
                total = totals.of(number, samples)
                if samples != share.samples or total != share.total:
                    share = Share(samples, total)
            progress.number, progress.share = number, share
            yield batch if move is None else move(batch)
    finally:
        if leave is not None:
            leave()


class _OwnBatches(RankBatches):
    """The batches of a loader in its own order."""

    stream: Stream

    def has_more(self, number: int) -> bool:  # noqa: ARG002 - contract
        return self.stream.has_more()

    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:  # noqa: ARG002 - contract
        return {"stream": self.stream.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, seed: int, replay: bool, continues_stream: bool
    ) -> int:
        batches: int = state["batches"]
        self.stream.load_state_dict(
            state.get("stream") or state,
            seed=seed,
            epoch=state["epoch"],
            batches=batches,
            replay=replay,
            continues_stream=continues_stream,
        )
        return batches


class StreamBatches(_OwnBatches):
    """The batches of an iterable, or of a ``DataLoader`` over one, whole or a share of them."""

    def __init__(self, loader: Iterable[Any], ranks: Ranks, *, seed: int, collate: Collate | None) -> None:
        self._loader, self._ranks = loader, ranks
        if ranks.shard:
            own = split_stream(loader, ranks.rank, ranks.size)
        else:
            own = None
        if own is None and ranks.shard and ranks.size > 1:
            raise LoaderError(cannot_shard(loader, ranks.size))
        self._is_split = own is not None and ranks.size > 1
        self._source = loader if own is None else own
        if collate is not None and isinstance(self._source, DataLoader):
            self._source = copy_loader(self._source, None, collate)
        size = ranks.size if self._is_split else 1
        self.stream = Stream(self._source, seed=seed, size=size, is_ours=self._source is not loader)
        self._totals = BatchTotals(loader, ranks)

    def iterate(self, progress: Progress, epoch: int, *, first: int, move: Move | None) -> Iterator[Any]:
        # A plain method, so that each batch passes through one generator only.
        progress.number = first - 1
        source = self.stream.epoch(epoch, continues_stream=progress.continues_stream, done=first)
        if self._ranks.any_rank is not None:
            return self._iterate_together(source, progress, move, self._ranks.any_rank)
        return _counted(source, progress, first, move, self._totals, self.stream.leave)

    def _iterate_together(
        self,
        source: Iterator[Any],
        progress: Progress,
        move: Move | None,
        any_rank: Callable[[bool], bool],
    ) -> Iterator[Any]:
        """Yield as many batches as the rank that has most; this rank's last one again counts nothing.

        Collective: one of ``any_rank`` before each batch and one at the end; ``agree`` before the first.
        """
        batch, done = None, 0
        while True:
            own_batch = next(source, NOTHING)
            if not done and self._ranks.agree is not None:
                self._ranks.agree("whether there is a batch to evaluate", own_batch is not NOTHING)
            if not any_rank(own_batch is not NOTHING):
                return
            progress.number, done = done, done + 1
            if own_batch is not NOTHING:
                batch = own_batch
            samples = count_samples(batch)
            own = 0 if own_batch is NOTHING else samples
            progress.share = Share(own, samples * self._ranks.size)
            yield batch if move is None else move(batch)

    def length(self, epoch: int) -> int:
        if self._is_split:
            msg = (
                f"the length of a stream says nothing of the shares of {self._ranks.size} ranks; give the "
                "number of batches that make an epoch: Limits(steps_per_epoch=...)"
            )
            raise LoaderError(msg)
        if isinstance(self._loader, Sized):
            try:
                return batches_in(self._source, epoch)
            except TypeError as error:  # a DataLoader over an iterable dataset without length
                raise _no_length(self._loader) from error
        raise _no_length(self._loader)


class ElasticBatches(_OwnBatches):
    """The batches of an `ElasticLoader`, which knows each rank's share of them."""

    def __init__(self, loader: ElasticLoader, ranks: Ranks, *, seed: int, parts: int | None) -> None:
        self._loader, self._skips_batches = loader, ranks.skips_batches
        rank, size = (ranks.rank, ranks.size) if ranks.shard else (0, 1)
        stand_ins = not ranks.skips_batches
        self._source: ElasticLoader | PartsOfElastic
        if parts is None:
            self._source = loader.for_rank(rank, size, stand_ins=stand_ins)
        else:
            self._source = PartsOfElastic(loader, rank, size, parts=parts, stand_ins=stand_ins)
        self.stream = Stream(self._source, seed=seed, size=1, is_ours=False)
        ranks.agree_on_data("where a loader stands", self._source.state_dict())

    def iterate(self, progress: Progress, epoch: int, *, first: int, move: Move | None) -> Iterator[Any]:
        progress.number = first - 1
        stream = self.stream
        source = stream.epoch(epoch, continues_stream=progress.continues_stream, done=first)
        return self._iterate(source, progress, first, move, stream)

    def _iterate(
        self,
        source: Iterator[Any],
        progress: Progress,
        first: int,
        move: Move | None,
        stream: Stream,
    ) -> Iterator[Any]:
        loader: Any = stream.loader
        try:
            for number, batch in enumerate(source, start=first):
                # Of a stream, an epoch has its own numbers; only evaluation skips some, and begins a pass.
                if self._skips_batches:
                    progress.number = loader.number
                else:
                    progress.number = number
                progress.share = loader.share
                yield batch if move is None else move(batch)
        finally:
            stream.leave()

    def length(self, epoch: int) -> int:
        if isinstance(self._loader, Sized):
            try:
                return batches_in(self._source, epoch)
            except TypeError as error:  # with the elastic loader's own remedy
                raise _no_length(self._loader, f": {error}") from error
        raise _no_length(self._loader)

    def measured(self) -> dict[str, float]:
        measure = getattr(self._source, "measured", None)
        if measure is None:
            return {}
        return dict(measure())
