"""Loaders whose batches are not ours to choose: how they are split over ranks, and where they stand.

An epoch of a stream is a number of batches, and not a new beginning: what an epoch leaves, the next one
goes on with. A pass goes from the stream's beginning to its end::

    passes    |--------- 0 ---------|--------- 1 ---------|
    epochs    |-- 0 --|-- 1 --|-- 2 --|-- 3 --|-- 4 --|
"""

import hashlib
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from tp_core._data._batches import call_set_epoch
from tp_core._data._seeding import preserve_rng_state, seeded
from tp_core._data._user_loaders import copy_loader, is_hugging_face, position_holder
from tp_core._data._workers import outliving_workers
from tp_core.errors import LoaderError

_NOTHING = object()


def is_stream(loader: object) -> bool:
    """Return whether epochs of ``loader`` may be parts of something longer: its data are iterable."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return not hasattr(loader, "__len__")


def split_stream(loader: Iterable[Any], rank: int, size: int) -> DataLoader[Any] | None:
    """Return a loader of one data rank's share of a stream, no sample of which another rank or worker has.

    The dataset says how: it is one of Hugging Face's ``datasets``, which split themselves over workers; or it
    has ``shard(index, count)``, which is asked for one share for each worker of each rank.

    Args:
        loader: The loader of the whole stream.
        rank: The data rank whose share it is.
        size: The number of data ranks.

    Returns:
        The loader, whose batches are this rank's shares of batches; ``None`` where the dataset does not say.

    Raises:
        LoaderError: The batches have no size that can be split over the ranks.
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
                f"that of the whole job, is not a multiple of it; give one that is, such as {8 * size}"
            )
            raise LoaderError(msg)
        own = loader.batch_size // size
        batches = BatchSampler(loader.sampler, own, loader.drop_last)
        copied.__dict__.update(batch_size=own, batch_sampler=batches)
    return copied


class _Shard(IterableDataset[Any]):
    """One rank's share of a dataset that has ``shard(index, count)``; in a worker, its share of that.

    Args:
        dataset: The whole.
        rank: Whose share it is.
        size: How many ranks there are.
    """

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        self._whole, self._rank, self._size = dataset, rank, size
        self._own: tuple[int, Any] | None = None  # whose it is, as workers may begin as copies, and the share

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share())

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which pass is next, and take the share anew."""
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


def start(loader: Iterable[Any], *, seed: int, epoch: int, is_ours: bool) -> Iterator[Any]:
    """Begin to iterate a loader; what that draws (a seed for workers) is not the model's to miss.

    Args:
        loader: The loader.
        seed: With the epoch, of what is drawn.
        epoch: Which epoch, or pass.
        is_ours: Whether the loader may be changed.
    """
    if type(loader) in {list, tuple}:  # which draw nothing; seeding all generators takes 0.1 ms
        return iter(loader)
    with seeded(seed, epoch, 1), outliving_workers(loader, keep=is_ours):
        return iter(loader)


class Stream:
    """The batches of a loader in their own order, and where in it an epoch stands.

    Args:
        loader: Yields the batches.
        seed: Of what is drawn where an iteration is started.
        size: Over how many data ranks it was split.
        is_ours: Whether it may be changed.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, size: int, is_ours: bool) -> None:
        self.loader = loader
        self._seed, self._size, self._is_ours = seed, size, is_ours
        self._is_endless = is_stream(loader)
        self._iterator: Iterator[Any] | None = None
        self._left: Iterator[Any] | None = None  # the iteration at hand, whoever has it
        self._ahead: Any = _NOTHING  # a batch that was read to learn whether there is one
        self._pass, self._done = 0, 0  # which pass it is in, and how many batches of it have been yielded
        self._skip = 0
        self._is_placed = False  # the loader itself knows where the next iteration begins
        self._beginning: str | None = None  # a digest of what it knows at the beginning of a pass

    def epoch(self, epoch: int, *, continues_stream: bool, done: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch; who takes them says where it ends.

        Args:
            epoch: Which one.
            continues_stream: Whether to go on where the epoch before has ended.
            done: How many batches of it have been yielded before, which are left out.
        """
        if continues_stream and self._is_endless:
            return self._go_on(done)
        if not self._is_placed:
            self._skip = done
        self._pass, self._done = epoch, done
        return self._start() if not self._is_endless else self._counted(self._start())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._done += 1
            yield batch

    def _go_on(self, done: int) -> Iterator[Any]:
        """Yield batches from where the epoch before has ended, and none of a second whole pass."""
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
        iterator = start(self.loader, seed=self._seed, epoch=self._pass, is_ours=self._is_ours)
        if skip:
            with preserve_rng_state():  # what is read again draws again
                deque(islice(iterator, skip), maxlen=0)
        self._left = iterator
        return iterator

    def has_more(self) -> bool:
        """Whether there is another batch; not of a loader that knows its position, which would move."""
        if self._left is None or position_holder(self.loader) is not None:
            return False
        batch = next(self._left, _NOTHING)
        if self._left is self._iterator:
            self._ahead = batch
        return batch is not _NOTHING

    def leave(self) -> None:
        """Forget the iteration at hand, which may have workers, where no other epoch goes on with it."""
        self._left = None

    def anew(self) -> "Stream":
        """Return the stream from its beginning, with an iteration and workers of its own."""
        loader = copy_loader(self.loader, None, None) if isinstance(self.loader, DataLoader) else self.loader
        return Stream(loader, seed=self._seed, size=self._size, is_ours=self._is_ours)

    def _note_pass(self) -> None:
        call_set_epoch(self.loader, self._pass)
        dataset: Any = getattr(self.loader, "dataset", None)
        if self._is_endless and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._pass)

    def close(self) -> None:
        """End its iteration, and the workers of that."""
        self._iterator, self._ahead = None, _NOTHING

    def check_position(self) -> None:
        """Make sure that the stream's position, which its dataset keeps, can be saved.

        Raises:
            LoaderError: Workers read copies of the dataset, and only these know where they stand.
        """
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
        """Return which pass it is in, how many batches of it are done, and what the loader knows itself."""
        state: dict[str, Any] = {"pass": self._pass, "done": self._done, "size": self._size}
        if (holder := position_holder(self.loader)) is not None:
            position = state["position"] = holder.state_dict()
            state["beginning"] = self._beginning
            # A dataset that begins again by itself has done so where the last batch of a pass was not full.
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
        """Go on from where a stream stood.

        Args:
            state: What :meth:`state_dict` returned.
            seed: As at the beginning.
            epoch: Which epoch it is in.
            batches: How many batches of the epoch were done.
            replay: Read what is before it again, where the loader has no other way.
            continues_stream: Whether the epochs go on where the ones before have ended.

        Raises:
            LoaderError: The stream cannot go on from there, or was split over another number of ranks.
        """
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
            holder = None  # their positions are without what lies in a shuffle buffer
        if "position" in state and holder is not None:
            if done or continues_stream:  # else an iteration begins at the beginning
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
