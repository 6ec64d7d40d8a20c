"""Streams: loaders of which tp cannot choose the batches, their split over ranks and their position.

An epoch of a stream is a number of batches and no new beginning: the next epoch continues where the last one
ended. A pass runs from the stream's beginning to its end::

    passes    |--------- 0 ---------|--------- 1 ---------|
    epochs    |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|
"""

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from tp_core.data._batches import call_set_epoch
from tp_core.data._user_loaders import (
    copy_loader,
    is_elastic,
    is_hugging_face,
    keeps_old_epochs,
    position_holder,
)
from tp_core.data._workers import iterate_seeded
from tp_core.errors import LoaderError
from tp_core.random import preserve_rng_state

NOTHING = object()


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
        if isinstance(loader, DataLoader) and keeps_old_epochs(loader):
            loader = copy_loader(loader, None, None)
            is_ours = True
        self.loader = loader
        self._seed, self._size, self._is_ours = seed, size, is_ours
        self._is_endless = is_stream(loader)
        self._iterator: Iterator[Any] | None = None
        self._current: Iterator[Any] | None = None  # the current iteration, of a pass or of one epoch
        self._ahead: Any = NOTHING  # a batch read by has_more, for the next epoch
        self._pass, self._done = 0, 0  # the current pass, and the batches of it that were yielded
        self._skip = 0
        self._is_placed = False  # whether the loader has loaded the position of the next iteration itself
        # Digests of its position: at the beginning of a pass, and at the end of the one before.
        self._beginning: str | None = None
        self._end: str | None = None

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
        if not self._is_endless:
            return self._start()
        return self._counted(self._start())

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
            batch, self._ahead = self._ahead, NOTHING
            if batch is NOTHING:
                batch = next(self._iterator, NOTHING)
            if batch is not NOTHING:
                self._done += 1
                yield batch
                continue
            if (holder := position_holder(self.loader)) is not None:
                self._end = _digest(holder.state_dict())
            self._iterator, self._pass, self._done = None, self._pass + 1, 0
            if began_here:  # it has less than an epoch
                return
            began_here = True

    def _start(self) -> Iterator[Any]:
        if not self._is_placed:
            self._note_pass()
            if (holder := position_holder(self.loader)) is not None:
                digest = _digest(holder.state_dict())
                # One that stands at its end until it is iterated again shows no beginning of later passes.
                stands_at_end = digest == self._end and digest != self._beginning
                self._beginning = None if stands_at_end else digest
        skip, self._skip, self._is_placed = self._skip, 0, False
        iterator = iterate_seeded(self.loader, seed=self._seed, epoch=self._pass, is_ours=self._is_ours)
        if skip:
            with preserve_rng_state():  # reading batches again draws numbers again
                deque(islice(iterator, skip), maxlen=0)
        self._current = iterator
        return iterator

    def has_more(self) -> bool:
        """Return whether there is another batch; ``False`` for a loader that keeps its own position.

        Reading ahead would move that position, and a checkpoint would then skip a batch.
        """
        if self._current is None or position_holder(self.loader) is not None:
            return False
        batch = next(self._current, NOTHING)
        if self._current is self._iterator:
            self._ahead = batch
        return batch is not NOTHING

    def leave(self) -> None:
        """Drop the current iteration, so that its workers end unless a later epoch continues it."""
        self._current = None

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
        self._iterator, self._ahead = None, NOTHING

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
        if continues_stream:
            done = state.get("done", batches)
        else:
            done = batches
        if continues_stream:
            self._pass = state.get("pass", epoch)
        else:
            self._pass = epoch
        self._done = done
        self._iterator, self._ahead, self._skip, self._is_placed = None, NOTHING, 0, False
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
