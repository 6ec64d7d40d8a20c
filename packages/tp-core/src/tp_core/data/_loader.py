"""Prepared loaders: one rank's share of every batch, in an order that depends on seed and epoch.

The order of the samples is a pure function of (seed, epoch): the sampler yields the epoch's batches in a
random state made of the two, which is restored afterwards. So every rank sees the same batches and takes
its share of each. No rank has to send its number of samples to another.
"""

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, get_worker_info

from tp_core.data._batches import EpochBatches, Share, call_set_epoch, count_samples, has_fewer
from tp_core.data._user_loaders import (
    ElasticLoader,
    PartsOfElastic,
    batches_in,
    cannot_shard,
    copy_loader,
    drawing,
    is_elastic,
    is_hugging_face,
    is_indexed,
    iterates_itself,
    order_is_ours,
    position_holder,
)
from tp_core.data._workers import iterate_seeded
from tp_core.errors import LoaderError
from tp_core.random import preserve_rng_state

# -- Streams: loaders of which tp cannot choose the batches, their split over ranks and their position
# An epoch of a stream is a number of batches and no new beginning: the next epoch continues where the last
# one ended. A pass runs from the stream's beginning to its end::
#
#     passes    |--------- 0 ---------|--------- 1 ---------|
#     epochs    |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|


_NOTHING = object()


def is_stream(loader: object) -> bool:
    """Return whether epochs of ``loader`` may be parts of something longer, as with an iterable dataset."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    try:
        return not isinstance(loader, Sized) or len(loader) < 0
    except TypeError:  # it has no length that is known
        return True


def split_stream(loader: Iterable[Any], rank: int, size: int) -> DataLoader[Any] | None:
    """Return a loader of one data rank's share of a stream; no other rank or worker has a sample of it.

    The dataset must support it: one of Hugging Face's ``datasets`` splits itself over workers. Another one
    has ``shard(index, count)``, which is called for one share per worker and rank.

    Returns:
        A loader of this rank's shares of the batches; ``None`` where the dataset has no such method.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return None
    dataset: Any = loader.dataset
    if is_hugging_face(dataset):
        if size > 1:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank=rank, world_size=size)
    elif not callable(getattr(dataset, "shard", None)):
        return None
    elif size > 1 or loader.num_workers > 1:
        dataset = _Shard(dataset, rank, size)
    copied = copy_loader(loader, None, None)
    copied.__dict__["dataset"] = dataset
    if size > 1:
        if loader.batch_size is None or loader.batch_size % size:
            msg = (
                f"the batches of a stream are split over {size} ranks, and batch_size={loader.batch_size}, "
                f"the whole job's, is not a multiple of it; give one that is, such as {8 * size}"
            )
            raise LoaderError(msg)
        own = loader.batch_size // size
        batches = BatchSampler(loader.sampler, own, loader.drop_last)
        copied.__dict__.update(batch_size=own, batch_sampler=batches)
    return copied


class _Shard(IterableDataset[Any]):
    """One rank's share of a dataset that has ``shard(index, count)``; in a worker, the worker's share."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        self._whole, self._rank, self._size = dataset, rank, size
        # The worker's number with its share: a forked worker begins with a copy of the parent's.
        self._own: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share())

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._whole, "set_epoch"):
            self._whole.set_epoch(epoch)
        self._own = None

    def _share(self) -> Any:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        key = -1 if worker is None else number
        if self._own is None or self._own[0] != key:
            share = self._whole.shard(self._rank * count + number, self._size * count)
            self._own = key, share
        return self._own[1]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self._share(), name)


class Stream:
    """The batches of a loader in their own order, and the position of an epoch among them."""

    def __init__(self, loader: Iterable[Any], *, seed: int, size: int, is_ours: bool) -> None:
        self.loader = loader
        self._seed, self._size, self._is_ours = seed, size, is_ours
        self._is_endless = is_stream(loader)
        self._iterator: Iterator[Any] | None = None
        self._left: Iterator[Any] | None = None  # the current iteration, of a pass or of one epoch
        self._ahead: Any = _NOTHING  # a batch read by has_more, for the next epoch
        self._pass, self._done = 0, 0  # the current pass, and the batches of it that were yielded
        self._skip = 0
        self._is_placed = False  # whether the loader has loaded the position of the next iteration itself
        self._beginning: str | None = None  # a digest of its position at the beginning of a pass

    def epoch(self, epoch: int, *, continues_stream: bool, done: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch; its consumer decides where the epoch ends.

        Args:
            epoch: The epoch.
            continues_stream: Whether to continue where the epoch before has ended.
            done: The number of its batches that were yielded before; they are left out.
        """
        if continues_stream and self._is_endless:
            return self._continue(done)
        if not self._is_placed:
            self._skip = done
        self._pass, self._done = epoch, done
        return self._start() if not self._is_endless else self._counted(self._start())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._done += 1
            yield batch

    def _continue(self, done: int) -> Iterator[Any]:
        """Yield batches from the end of the epoch before, at most to the end of a pass that it began."""
        began_here = self._iterator is None and self._done <= done
        while True:
            if self._iterator is None:
                self._iterator = self._start()
            batch, self._ahead = self._ahead, _NOTHING
            if batch is _NOTHING:
                batch = next(self._iterator, _NOTHING)
            if batch is not _NOTHING:
                self._done += 1
                yield batch
                continue
            self._iterator, self._pass, self._done = None, self._pass + 1, 0
            if began_here:  # it has less than an epoch
                return
            began_here = True

    def _start(self) -> Iterator[Any]:
        if not self._is_placed:
            self._note_pass()
            if (holder := position_holder(self.loader)) is not None:
                self._beginning = _digest(holder.state_dict())
        skip, self._skip, self._is_placed = self._skip, 0, False
        iterator = iterate_seeded(self.loader, seed=self._seed, epoch=self._pass, is_ours=self._is_ours)
        if skip:
            with preserve_rng_state():  # reading batches again draws numbers again
                deque(islice(iterator, skip), maxlen=0)
        self._left = iterator
        return iterator

    def has_more(self) -> bool:
        """Return whether there is another batch; ``False`` for a loader that keeps its own position.

        Reading ahead would move that position, and a checkpoint would then skip a batch.
        """
        if self._left is None or position_holder(self.loader) is not None:
            return False
        batch = next(self._left, _NOTHING)
        if self._left is self._iterator:
            self._ahead = batch
        return batch is not _NOTHING

    def leave(self) -> None:
        """Drop the current iteration, so that its workers end unless a later epoch continues it."""
        self._left = None

    def again(self) -> "Stream":
        """Return a stream from the same beginning, with its own iteration and workers."""
        loader = self.loader
        if isinstance(loader, DataLoader):
            loader = copy_loader(loader, None, None)
        elif is_elastic(loader):
            loader = copy.copy(loader)
        return Stream(loader, seed=self._seed, size=self._size, is_ours=self._is_ours)

    def _note_pass(self) -> None:
        call_set_epoch(self.loader, self._pass)
        dataset: Any = getattr(self.loader, "dataset", None)
        if self._is_endless and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._pass)

    def close(self) -> None:
        self._iterator, self._ahead = None, _NOTHING

    def check_position(self) -> None:
        """Check that a position which the dataset keeps can be saved."""
        loader = self.loader
        if not isinstance(loader, DataLoader) or not self._is_endless or not loader.num_workers:
            return
        dataset: Any = loader.dataset
        if hasattr(dataset, "load_state_dict") and position_holder(loader) is None:
            msg = (
                f"no run could resume from a checkpoint: where a stream ({type(dataset).__name__}) stands is "
                f"known in the {loader.num_workers} workers of its DataLoader alone; take torchdata's "
                "StatefulDataLoader, num_workers=0, or allow what came before to be read again: "
                "Checkpoints(..., replay=True)"
            )
            raise LoaderError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the current pass, its batches that are done, and the loader's own position if it has one."""
        state: dict[str, Any] = {"pass": self._pass, "done": self._done, "size": self._size}
        if (holder := position_holder(self.loader)) is not None:
            position = state["position"] = holder.state_dict()
            state["beginning"] = self._beginning
            # A dataset that restarts by itself has done so after the last, partial batch of a pass: it
            # stands at the beginning, and the counters must, too.
            if self._done and _digest(position) == self._beginning:
                state |= {"pass": self._pass + 1, "done": 0}
        return state

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        seed: int,
        epoch: int,
        batches: int,
        replay: bool,
        continues_stream: bool,
    ) -> None:
        if state.get("size", 1) != self._size:
            msg = (
                f"the stream was split over {state.get('size', 1)} ranks, and it is over {self._size} now: "
                "where each of them stood says nothing of other shares; resume on as many ranks"
            )
            raise LoaderError(msg)
        continues_stream, self._seed = continues_stream and self._is_endless, seed
        done = state.get("done", batches) if continues_stream else batches
        self._pass, self._done = state.get("pass", epoch) if continues_stream else epoch, done
        self._iterator, self._ahead, self._skip, self._is_placed = None, _NOTHING, 0, False
        self._beginning = state.get("beginning")
        holder = position_holder(self.loader)
        if replay and is_hugging_face(getattr(self.loader, "dataset", None)):
            holder = None  # their position leaves out the contents of a shuffle buffer: samples would be lost
        if "position" in state and holder is not None:
            if done or continues_stream:  # else the next iteration begins at the beginning
                self._note_pass()
                holder.load_state_dict(state["position"])
                self._is_placed = True
        elif replay or not done or isinstance(self.loader, Sequence):
            self._skip = done
        else:
            msg = (
                f"the loader ({type(self.loader).__name__}) cannot be put at batch {done} without reading "
                "those before it; give it, or its dataset, state_dict() and load_state_dict(), take "
                "torchdata's StatefulDataLoader (with workers, too), or allow the reading: "
                "Checkpoints(..., replay=True)"
            )
            raise LoaderError(msg)


def _digest(position: object) -> str:
    return hashlib.sha256(pickle.dumps(position)).hexdigest()


# -- Prepared loaders -----------------------------------------------------------------------------


_WHOLE_DATA = "tp splits the data over the ranks itself: give every rank the whole dataset, in the same order"


class PreparedLoader:
    """An iterable over one data rank's share of every batch of a loader, moved to its device.

    Each new iteration is the next epoch, unless :meth:`set_epoch` chose another. The user's loader keeps
    all its options and is not changed.

    Attributes:
        loader: The user's loader.
        watch: A wrapper of every iteration, to observe what is yielded; ``None`` costs nothing.
        number: The number of the last batch of the epoch, from 0, among those of all data ranks. In
            evaluation a rank skips a batch of which it has no sample.
        share: The samples of that batch that this rank has, and all ranks have, for `Session.backward`;
            ``None`` before the first.
        continues_stream: Whether an iteration over a stream continues where the one before ended, instead of
            from the beginning. Its consumer ends it, or the stream's end if it began with the stream.
    """

    continues_stream = False
    stream: Stream | None = None
    watch: Callable[[Iterator[Any]], Iterator[Any]] | None = None
    number = -1
    share: Share | None = None
    _has_fewer = False  # whether a batch had fewer samples than were chosen: the warning comes once
    _left: Iterator[Any] | None = None  # the current iteration of a class with its own __iter__

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
        agree: Callable[..., None] | None = None,
        any_rank: Callable[[bool], bool] | None = None,
        collate: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]] | None = None,
        parts: int | None = None,
    ) -> None:
        """Prepare ``loader``.

        Args:
            loader: A ``DataLoader``, or with one data rank any iterable of batches.
            seed: Orders the samples, together with the epoch.
            rank: The data rank.
            size: The number of data ranks.
            training: Whether a rank without samples of a batch gets a stand-in. In evaluation small
                batches are joined, or skipped by ranks that have no sample of them.
            shard: Whether batches are split over the data ranks.
            move: Moves a batch to the device; ``None`` leaves it where it is.
            agree: ``agree(what, value, remedy=...)`` raises unless all ranks have the same value.
            any_rank: ``any_rank(mine)`` returns whether it holds on any rank. Given where ranks must take the
                same steps in evaluation, too: a rank without samples then gets a stand-in.
            collate: Turns the collate function of a ``DataLoader`` into the one to use; batches of
                other loaders stay as they are.
            parts: The number of devices that a batch in `Parts` is for; an `ElasticLoader` makes as many.

        Raises:
            LoaderError: The loader cannot be iterated, or not be split over the ranks.

        Collective: with ``agree``, its all-gathers of objects; none without.
        """
        if not isinstance(loader, Iterable):
            msg = f"a loader must be iterable, got {type(loader).__name__}: {loader!r}"
            raise LoaderError(msg)
        self.loader = loader
        self._epoch = 0
        self._first = 0
        self._has_begun = False
        self._seed = seed
        self._move = move
        self._agree = partial(agree, remedy=_WHOLE_DATA) if shard and agree is not None else None
        self._any_rank, self._agree_on_start = any_rank, agree
        self._rank, self._size = rank, size
        self._batches: EpochBatches | None = None
        self._source = loader
        self._is_split = False
        self._skips_batches = not training and any_rank is None
        if is_elastic(loader):
            own_rank, stand_ins = (rank, size) if shard else (0, 1), not self._skips_batches
            self._source = (
                loader.for_rank(*own_rank, stand_ins=stand_ins)
                if parts is None
                else PartsOfElastic(loader, *own_rank, parts=parts, stand_ins=stand_ins)
            )
            self.stream = Stream(self._source, seed=seed, size=1, is_ours=False)
            if self._agree is not None:
                self._agree("where a loader stands", self._source.state_dict())
            return
        if not shard or not is_indexed(loader):
            own = split_stream(loader, self._rank, size) if shard else None
            if own is not None:
                self._source, self._is_split = own, size > 1
            elif shard and size > 1:
                raise LoaderError(cannot_shard(loader, size))
            if collate is not None and isinstance(self._source, DataLoader):
                self._source = copy_loader(self._source, None, collate)
            self.stream = Stream(
                self._source,
                seed=seed,
                size=size if self._is_split else 1,
                is_ours=self._source is not loader,
            )
            return
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            # In one process, too: the sampler gives a share of the data, and the others would be lost.
            if isinstance(sampler, DistributedSampler) and max(size, sampler.num_replicas) > 1:
                msg = (
                    f"the loader's DistributedSampler already splits the data over {sampler.num_replicas} "
                    f"ranks, and the backend would split it again, over {size}; give a plain loader "
                    "(shuffle=True), or call prepare(loader, shard=False)"
                )
                raise LoaderError(msg)
        self._batches = EpochBatches(
            loader.batch_sampler,
            seed=seed,
            rank=rank,
            size=size,
            training=training,
            stand_ins=any_rank is not None,
        )
        self._source = copy_loader(loader, self._batches, collate)
        if self._agree is not None:
            self._agree("the number of batches of a loader", len(self._batches))
            if size > 1:
                self._agree("what a loader draws", drawing(loader))

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def measured(self) -> dict[str, float]:
        """Return the sums that an elastic loader has of this rank's batches; none of another loader."""
        found = getattr(self._source, "measured", None)
        return {} if found is None or not is_elastic(self._source) else dict(found())

    def __len__(self) -> int:
        """Return the number of batches of the next epoch.

        Raises:
            LoaderError: The user's loader has no length.
        """
        source, why = self.loader if self._batches is None else self._batches, ""
        if self._is_split:
            msg = (
                f"the length of a stream says nothing of the shares of {self._size} ranks; give the number "
                "of batches that make an epoch: Limits(steps_per_epoch=...)"
            )
            raise LoaderError(msg)
        if isinstance(source, Sized):
            try:
                return len(source) if self._batches is not None else batches_in(self._source, self._epoch)
            except TypeError as error:  # a DataLoader over an iterable dataset without length, or
                why = f": {error}" if is_elastic(self.loader) else ""  # the elastic loader's own remedy
        msg = (
            f"the loader ({type(self.loader).__name__}) has no length{why}; give the number of batches that "
            "make an epoch: Limits(steps_per_epoch=...)"
        )
        raise LoaderError(msg)

    def has_more(self) -> bool:
        """Return whether there is a batch after the last one that was yielded, whatever the length said.

        Call it during the iteration. A stream keeps that batch for the next epoch; another loader drops it.
        """
        if self.stream is not None:
            return self.stream.has_more()
        if self._left is not None:
            return next(self._left, _NOTHING) is not _NOTHING
        return self._batches is not None and len(self._batches.order) > self.number + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        first, self._first = self._first, 0
        before = self.number, self.share
        self.number, self._has_begun = first - 1, True
        if self.stream is not None:
            batches = self._iterate_opaque(epoch, first, self.stream)
        else:
            batches = self._iterate_indexed(epoch, first, before)
        return batches if self.watch is None else self.watch(batches)

    def _iterate_indexed(self, epoch: int, first: int, before: tuple[int, Share | None]) -> Iterator[Any]:
        """Yield from a loader of which tp chooses the batches.

        Args:
            epoch: The epoch.
            first: The first batch of it to yield.
            before: The number and the share of the iteration around this one, if there is one: restored when
                this one has ended.

        Collective: with a sampler of the user's own, ``agree`` on the order, once before the first batch.
        """
        move, batches = self._move, self._batches
        if batches is None:
            return
        batches.start(epoch, first=first)
        if self._agree is not None and not order_is_ours(batches.inner):
            self._agree(f"the order of the samples in epoch {epoch}", batches.digest)
        batches.begin(epoch)
        length, shares = len(batches.order), None
        has_own = iterates_itself(self.loader)
        looks = True
        try:
            source = iterate_seeded(self._source, seed=self._seed, epoch=epoch, is_ours=True)
            self._left = source if has_own else None
            if has_own and self._size == 1:  # it may leave batches out, or repeat them
                yield from self._iterate_counted(source, first)
                return
            for batch in source:
                if shares is None:
                    shares = batches.shares
                if not shares:
                    msg = (
                        f"the loader, {type(self.loader).__name__}, has yielded more than the {length} "
                        "batches that its sampler gives: its own __iter__ repeats some, and which samples of "
                        "them are this rank's is not known; repeat samples in the sampler instead"
                    )
                    raise LoaderError(msg)
                self.number, self.share = shares.popleft()
                if looks:  # in training at the first batch of an epoch alone
                    self._has_fewer = self._has_fewer or has_fewer(batch, self.share.samples)
                    looks = not self._has_fewer and not batches.is_training
                yield batch if move is None else move(batch)
            if batches.shares if shares is None else shares:
                msg = (
                    f"the loader ended after {self.number + 1} of {length} batches, without an error: what "
                    "loads a sample has raised StopIteration, as next() does on an iterator that has ended, "
                    "and torch takes that for the end of the data; look at the dataset's __getitem__ and at "
                    "collate_fn: give next() a default there"
                )
                raise LoaderError(msg)
        finally:
            self._left = None
            batches.end(epoch)
            if batches.is_begun:
                self.number, self.share = before

    def _iterate_counted(
        self, source: Iterator[Any], first: int, leave: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Yield batches that tp did not choose, with their samples counted; at the end call ``leave``."""
        move, share = self._move, Share(0, 0)
        try:
            for number, batch in enumerate(source, start=first):
                # The counts of other ranks are not known here, and assumed to be the same.
                samples = count_samples(batch)
                if samples != share.samples:
                    share = Share(samples, samples * self._size)
                self.number, self.share = number, share
                yield batch if move is None else move(batch)
        finally:
            if leave is not None:
                leave()

    def _iterate_opaque(self, epoch: int, first: int, stream: Stream) -> Iterator[Any]:
        """Return the batches of a loader of which tp cannot choose them.

        A plain method, so that each batch passes through one generator only.
        """
        source = stream.epoch(epoch, continues_stream=self.continues_stream, done=first)
        if is_elastic(stream.loader):
            return self._iterate_elastic(source, first, stream, stream.loader)
        if self._any_rank is not None:
            return self._iterate_together(source, self._any_rank)
        return self._iterate_counted(source, first, stream.leave)

    def _iterate_elastic(
        self, source: Iterator[Any], first: int, stream: Stream, loader: ElasticLoader
    ) -> Iterator[Any]:
        """Yield from a loader that knows the shares of its batches."""
        move = self._move
        try:
            for number, batch in enumerate(source, start=first):
                # Of a stream, an epoch has its own numbers; only evaluation skips some, and begins a pass.
                self.number, self.share = loader.number if self._skips_batches else number, loader.share
                yield batch if move is None else move(batch)
        finally:
            stream.leave()

    def _iterate_together(self, source: Iterator[Any], any_rank: Callable[[bool], bool]) -> Iterator[Any]:
        """Yield as many batches as the rank that has most; this rank's last one again counts nothing.

        Collective: one of ``any_rank`` before each batch and one at the end; ``agree`` before the first.
        """
        batch, done = None, 0
        while True:
            mine = next(source, _NOTHING)
            if not done and self._agree_on_start is not None:
                self._agree_on_start("whether there is a batch to evaluate", mine is not _NOTHING)
            if not any_rank(mine is not _NOTHING):
                return
            self.number, done = done, done + 1
            batch = batch if mine is _NOTHING else mine
            samples = count_samples(batch)
            self.share = Share(0 if mine is _NOTHING else samples, samples * self._size)
            yield batch if self._move is None else self._move(batch)

    # -- positions for checkpoints ------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make iterations in this block cover the whole stream; training then continues where it was."""
        stream, number, share = self.stream, self.number, self.share
        if stream is None or not self.continues_stream:
            yield
            return
        self.stream = own = stream.again()
        self.continues_stream = False
        try:
            yield
        finally:
            own.close()
            self.stream, self.continues_stream, self.number, self.share = stream, True, number, share

    def check_position(self) -> None:
        """Check that a run could continue from a checkpoint in the middle of these batches.

        Raises:
            LoaderError: Only workers know the position in a stream.
        """
        if self.stream is not None and self.continues_stream:
            self.stream.check_position()

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return the loader's position, for :meth:`load_state_dict`.

        Args:
            batches: The batches of the current epoch that were used; all that were yielded by default.
        """
        epoch = self._epoch - 1
        if batches is None:
            epoch, batches = (epoch, self.number + 1) if self._has_begun else (self._epoch, self._first)
        state: dict[str, Any] = {"seed": self._seed, "epoch": epoch, "batches": batches}
        if self._batches is not None:
            state["samples"] = sum(map(len, self._batches.order_of(epoch)[:batches]))
            state["dataset"] = self._n_samples()
            if not order_is_ours(self._batches.inner):
                state["order"] = self._batches.digest_of(epoch)
        elif self.stream is not None:
            state["stream"] = self.stream.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, replay: bool = False) -> int:
        """Make the next iteration continue from a saved position.

        Batches of a ``DataLoader`` over a dataset with length are skipped by their indices: no
        sample of them is read.

        Args:
            state: The result of :meth:`state_dict`.
            replay: Read the batches before it again and drop them, where the loader has no other
                way.

        Returns:
            The number of batches of the epoch that are done; it differs with another batch size.

        Raises:
            LoaderError: The loader can only get there by a replay; or the position is in the middle
                of one of its batches; or of an epoch over another number of samples.
        """
        had, has = state.get("dataset"), self._n_samples()
        if state.get("samples") and had != has:
            msg = (
                f"the dataset has {has} samples, and had {had} where it stood at sample {state['samples']} "
                "of an epoch: their order is another one now; give the same data, or resume from the end "
                "of an epoch"
            )
            raise LoaderError(msg)
        self._seed, self._epoch, self._has_begun = state["seed"], state["epoch"], False
        batches: int = state["batches"]
        if self._batches is not None:
            self._batches.seed = self._seed
            self._first = batches = self._batches.find(
                self._epoch, state.get("samples", 0), order=state.get("order")
            )
        elif self.stream is not None:
            stream = state.get("stream") or state
            self.stream.load_state_dict(
                stream,
                seed=self._seed,
                epoch=self._epoch,
                batches=batches,
                replay=replay,
                continues_stream=self.continues_stream,
            )
            self._first = batches
        return batches

    def _n_samples(self) -> int | None:
        dataset = getattr(self.loader, "dataset", None)
        return len(dataset) if isinstance(dataset, Sized) else None
