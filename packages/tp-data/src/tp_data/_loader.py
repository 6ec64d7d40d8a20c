"""The loader: this rank's part of each global batch, loaded in workers, at a position that can be saved.

Only positions travel to workers, and batches back. The state moves with the batch that is yielded, whatever
workers have read ahead::

    main process      positions -> batcher -> rows of all ranks -> this rank's rows
    worker            rows -> samples, with their own random numbers -> batch
    main process      batch, share, state -> the loop
"""

import copy
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from tp_core import LaunchEnvironment
from tp_core.arguments import explain_init
from tp_core.data import Envelope, Share, iterate_seeded
from tp_core.errors import ConfigError, LoaderError, StateError
from tp_core.random import preserve_rng_state

from tp_data._batches import Batcher, BatchSize, Item, ItemsInOrder, SampleRow, UnfitSampleError, positions_in
from tp_data._draws import DrawWatch
from tp_data._order import Places, groups, key_of
from tp_data._sources import Source
from tp_data._stream import Stream

# -- What samples cost, noted in files: a later epoch or run need not load a sample to plan batches
# A file for each source has a number for each sample, 0 for one that is not known yet. Ranks and runs write
# at once without a lock: all of them write the same numbers, and a process that is killed leaves whole ones.


_NBYTES = 4


class Costs:
    """The costs of the samples of sources that are known.

    Args:
        folder: The folder of the files. It belongs to one transform and one way to count.
        sources: The sources, by name.
    """

    def __init__(self, folder: str | os.PathLike[str], sources: Mapping[str, Source]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._noted: list[Any] = []
        for name, source in sources.items():
            path = self.folder / f"{key_of(name, source.digest):016x}.costs"
            with path.open("ab") as file:
                file.truncate(_NBYTES * len(source))  # what is new in it reads as 0
            self._noted.append(np.memmap(path, "<u4", "r+", shape=(len(source),)))

    def find(self, places: Places) -> list[int] | None:
        """Return the costs at places; ``None`` if one of them is not known."""
        sources, indices = places
        noted = np.empty(len(sources), np.int64)
        for number, at in groups(sources):
            noted[at] = self._noted[number][indices[at]]
        if noted.all():
            return (noted - 1).tolist()
        return None

    def note(self, places: Places, costs: Sequence[int]) -> None:
        """Note the costs at places."""
        sources, indices = places
        numbers = np.asarray(costs)
        for number, at in groups(sources):
            self._noted[number][indices[at]] = numbers[at] + 1


# -- The loader: this rank's part of each global batch, loaded in workers, at a position that can be saved
# Only positions travel to workers, and batches back. The state moves with the batch that is yielded, whatever
# workers have read ahead::
#
#     main process      positions -> batcher -> rows of all ranks -> this rank's rows
#     worker            rows -> samples, with their own random numbers -> batch
#     main process      batch, share, state -> the loop


_COSTS_AT_ONCE = 64
_NO_END = 1 << 62  # positions of a stream that repeats its sources


@dataclass(slots=True)
class Stats:
    """Sums over the batches that a loader has yielded, in this process.

    Attributes:
        batches: The batches.
        rows: The rows of this rank.
        skipped: The samples that could not be loaded; others took their places.
        wait_s: How long the loop waited for batches.
        measured: The batcher's own numbers, such as tokens.
        errors: The first errors of samples that were skipped.
    """

    batches: int = 0
    rows: int = 0
    skipped: int = 0
    wait_s: float = 0.0
    measured: dict[str, float] = field(default_factory=dict, init=False)
    errors: list[str] = field(default_factory=list, init=False)


_MOST_ERRORS = 20


class _LoadTask(NamedTuple):
    epoch: int
    rows: Sequence[SampleRow] = ()
    costs: Sequence[int] = ()  # positions, to ask for their costs instead of a batch
    noted: Sequence[int] = ()  # the costs that the rows were planned with, where they come from a file


@dataclass(slots=True)
class _LoadResult:
    """What a worker returns: a batch, or an error that the main process raises."""

    batch: Any = None
    measured: Mapping[str, float] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    drew: bool = False  # random numbers: the workers of the next epoch are told
    error: BaseException | None = None

    def __reduce__(self) -> tuple[type["_LoadResult"], tuple[Any, ...]]:
        return _LoadResult, (self.batch, self.measured, self.skipped, self.drew, self.error)

    def pin_memory(self) -> "_LoadResult":
        """Return the same with the batch in page-locked memory; torch's loader calls it."""
        return replace(self, batch=Envelope(self.batch, 0).pin_memory().batch)


class _TaskDataset(Dataset[_LoadResult]):
    """Loads what tasks ask for, in a worker or in the main process."""

    def __init__(self, stream: Stream, batcher: Batcher, *, skips: bool, has_drawn: bool) -> None:
        self._stream, self._batcher, self._skips = stream, batcher, skips
        # Only what loads the same samples again can look first whether something draws.
        can_load_again = all(source.makes_samples and not source.draws for source in stream.sources.values())
        self._seeds = stream.draws and (has_drawn or not can_load_again)
        self._draws = DrawWatch()

    def __getitem__(self, task: _LoadTask) -> _LoadResult:
        try:
            if not self._stream.draws:
                return self._do(task, seeds=False)
            return self._do_as_seeded(task)
        except Exception as error:  # noqa: BLE001 - torch would put a worker's traceback into its text
            return _LoadResult(error=error)

    def _do_as_seeded(self, task: _LoadTask) -> _LoadResult:
        """Return what it is with generators that are seeded for each sample, and seed none if nothing draws.

        Seeding takes several times as long as reading a line. So the task runs without, and once more where
        the states of generators show that something drew; all later ones are seeded.
        """
        is_worker = get_worker_info() is not None
        if not self._seeds and self._draws.begin(as_left=is_worker):
            try:
                result = self._do(task, seeds=False)
            except Exception:
                if not self._draws.drew():
                    raise
            else:
                if not self._draws.drew():
                    return result
            self._seeds = True
            self._draws.restore()
        if is_worker:
            return self._do(task, seeds=True)
        with preserve_rng_state(()):
            return self._do(task, seeds=True)

    def _do(self, task: _LoadTask, *, seeds: bool) -> _LoadResult:
        skipped: list[str] = []

        def note(error: LoaderError) -> None:
            skipped.append(str(error))

        skip = note if self._skips else None
        if task.costs:
            samples = self._stream.load(list(task.costs), task.epoch, skip, seeds=seeds)
            return _LoadResult([self._cost(p, samples[p], task.epoch) for p in task.costs])
        positions = positions_in(task.rows)
        samples = self._stream.load(positions, task.epoch, skip, seeds=seeds)
        for position, noted in zip(positions, task.noted, strict=bool(task.noted)):
            if (cost := self._cost(position, samples[position], task.epoch)) != noted:
                msg = (
                    f"{self._stream.place(position, epoch=task.epoch).where}: the sample costs {cost}, and "
                    f"{noted} is noted of it: the transform, or what counts, is another one; give each a "
                    "folder of its own: Loader(costs=folder)"
                )
                raise LoaderError(msg)
        try:
            batch = self._batcher.collate(task.rows, samples)
        except TypeError as error:
            for position, sample in samples.items():
                if sample is None:
                    where = self._stream.place(position, epoch=task.epoch).where
                    msg = f"{where}: the sample is None; let the transform, or the source, return a value"
                    raise LoaderError(msg) from error
            raise
        return _LoadResult(batch, self._batcher.measure(batch), skipped, seeds)

    def _cost(self, position: int, sample: Any, epoch: int) -> int:
        if self._batcher.cost is None:
            return 1
        try:
            return self._batcher.cost(sample)
        except LoaderError as error:
            where = self._stream.place(position, epoch=epoch).where
            raise LoaderError(f"{where}: {error}") from error  # noqa: EM102 - a place before a sentence


def _unchanged(value: Any) -> Any:
    return value


_explain_loader = partial(
    explain_init,
    instead={
        "collate_fn": "Loader(stream, BatchSize(8, collate=collate_fn))",
        "drop_last": "Loader(stream, BatchSize(8, last='drop'))",
        "sampler": "Loader(Stream(..., shuffle=True), 8)",
    },
)


@_explain_loader
class Loader:
    """An iterable over batches of a stream; each iteration is an epoch, or what is left of one.

    In a plain loop it yields this process's part of each global batch, by the variables of the launcher or by
    torch's process group. `Trainer.fit`, Accelerate and Lightning take it as it is.

    Attributes:
        stream: The stream.
        share: The rows of this rank, and of all ranks, in the batch that was yielded last; 0 of this rank for
            a stand-in, where there are fewer rows than ranks.
        number: The number of that batch in its epoch, from 0; -1 before the first.
        stats: Sums over the batches that were yielded, also by loaders of :meth:`for_rank`, as a trainer has
            them.

    Example:
        >>> loader = Loader(Stream(range(10), shuffle=True), 4)
        >>> len(loader), sorted(int(x) for batch in loader for x in batch) == list(range(10))
        (3, True)
    """

    share: Share | None = None

    def __init__(
        self,
        stream: Stream,
        batch: int | Batcher,
        *,
        workers: int = 0,
        prefetch: int = 2,
        errors: Literal["raise", "skip"] = "raise",
        timeout_s: float = 0.0,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        costs: str | PathLike[str] | None = None,
    ) -> None:
        """Set the loader.

        Args:
            stream: The samples in their order.
            batch: The samples of a step on all ranks together; or a batcher.
            workers: The processes that load, for each rank; 0 loads in the main process.
            prefetch: The batches that each worker reads ahead.
            errors: Whether a sample that cannot be loaded is raised, or skipped: then the next one that can
                takes its place, on any number of ranks, and ``stats`` counts it.
            timeout_s: How long a batch may take in workers; 0 waits for ever.
            pin_memory: Whether batches are put into page-locked memory.
            multiprocessing_context: As of torch's ``DataLoader``.
            costs: A folder for what samples cost, where batches depend on it. Each sample is then counted
                once, by any rank and run, and the number of batches of an epoch is known. Take another
                folder for another transform; one that does not fit is refused.

        Raises:
            ConfigError: An option has a wrong type or value.
        """
        if not isinstance(stream, Stream):
            msg = f"a Loader needs a Stream, got {type(stream).__name__}; write Loader(Stream(...), ...)"
            raise ConfigError(msg)
        if errors not in ("raise", "skip"):
            msg = f"errors={errors!r}: a sample that cannot be loaded can 'raise' or be 'skip'ped"
            raise ConfigError(msg)
        for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                msg = f"{name}={value!r}: give a number from {least} on"
                raise ConfigError(msg)
        if timeout_s and not workers:
            msg = "timeout_s ends the wait for worker processes; give workers=1 or more, too"
            raise ConfigError(msg)
        self.stream = stream
        if isinstance(batch, Batcher):
            self.batcher = batch
        else:
            self.batcher = BatchSize(batch)
        self.stats = Stats()
        self._counted = [self.stats]
        self._workers, self._prefetch, self._skips = workers, prefetch, errors == "skip"
        self._timeout_s, self._pin_memory, self._context = timeout_s, pin_memory, multiprocessing_context
        self._costs: Costs | None = None
        if costs is not None and self.batcher.cost is not None:
            self._costs = Costs(costs, stream.sources)
        self._lengths: dict[int, int] = {}
        self._has_drawn = False  # whether a transform, or a batcher, was seen to draw random numbers
        self._rank: int | None = None
        self._size, self._stand_ins = 1, True
        self._epoch = 0  # of the next iteration
        self._state = {"epoch": 0, "batch": 0, "position": 0}
        self._resumes = False
        self.number = -1

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse an index: a loader is no dataset."""
        msg = (
            f"a Loader has batches one after the other, and none at [{index!r}]; write for batch in loader, "
            "without torch's DataLoader around it"
        )
        raise ConfigError(msg)

    def for_rank(self, rank: int, size: int, *, stand_ins: bool = True) -> "Loader":
        """Return a loader of one rank's parts of the same batches, with a position of its own.

        Args:
            rank: The rank, among those that divide the data.
            size: The number of these ranks.
            stand_ins: Whether a rank without a row of a batch gets one of another rank's, so that all take
                the same steps; else it has no such batch.
        """
        own = copy.copy(self)
        own._rank, own._size, own._stand_ins = rank, size, stand_ins
        own.stats = Stats()
        own._counted = [*self._counted, own.stats]
        return own

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: It is not known: the stream has no end, or batches depend on the samples.
        """
        return self.batches_in(self._epoch)

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches of an epoch; they may be more in one than in another.

        With ``costs``, samples of unknown cost are loaded now. Each rank begins with other ones.

        Raises:
            TypeError: It is not known.
        """
        samples = len(self.stream)
        length = self.batcher.length(samples)
        if length is not None:
            return length
        if self._costs is None:
            msg = (
                f"the number of batches of {type(self.batcher).__name__} depends on the samples; "
                "Loader(costs=folder) counts these once, and knows it then"
            )
            raise TypeError(msg)
        if epoch not in self._lengths:
            rank, size = self._place()
            own = samples * rank // size
            deque(self._items(chain(range(own, samples), range(own)), epoch), maxlen=0)
            begin = {"epoch": epoch, "batch": 0, "position": 0}
            self._lengths = {epoch: sum(1 for _ in self._batches(begin, copy.copy(self.batcher)))}
        return self._lengths[epoch]

    def _place(self) -> tuple[int, int]:
        """Return the rank, and the number of ranks."""
        if self._rank is None:
            return _launched()
        return self._rank, self._size

    def measured(self) -> dict[str, float]:
        """Return the sums of `stats` that are of the data: what the batcher measures, waits and skips."""
        stats = self.stats
        return {**stats.measured, "wait_s": stats.wait_s, "skipped": float(stats.skipped)}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from its beginning."""
        if not isinstance(epoch, int) or epoch < 0:
            msg = f"epoch must be a whole number from 0, got {epoch!r}"
            raise ConfigError(msg)
        self._epoch, self._resumes = epoch, False
        self._state = {"epoch": epoch, "batch": 0, "position": 0}

    # -- states -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the batch that was yielded last: the same on all ranks, and JSON."""
        state = self._state
        return {**state, **self.stream.fingerprint(state["position"], state["epoch"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from a state, on any number of ranks and workers.

        Raises:
            StateError: It is no state of a loader, or one of other sources or another order.
        """
        lacking = sorted({"epoch", "batch", "position", "order", "sources"} - set(state))
        if lacking:
            msg = f"this is no state of tp_data's Loader: it lacks {lacking}"
            raise StateError(msg)
        self.stream.check(state, state["position"], state["epoch"])
        if state.get("batcher"):
            batcher_state = {"batcher": state["batcher"]}
        else:
            batcher_state = {}
        if batcher_state and self.batcher.start.__func__ is Batcher.start:  # type: ignore[attr-defined]
            msg = (
                f"the state has samples that another batcher held back, and {type(self.batcher).__name__} "
                "holds none: they would be lost; give the batcher that it had"
            )
            raise StateError(msg)
        self._state = {key: state[key] for key in ("epoch", "batch", "position")} | batcher_state
        self._epoch, self._resumes = state["epoch"], True

    # -- iteration ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if not self._resumes:
            self._state = {"epoch": self._epoch, "batch": 0, "position": 0}
        self._epoch, self._resumes = self._state["epoch"] + 1, False
        return self._iterate(self._state)

    def _iterate(self, state: dict[str, Any]) -> Iterator[Any]:
        rank, size = self._place()
        planned: deque[tuple[dict[str, Any], Share]] = deque()
        plan = self._plan(state, rank, size, planned)
        done: _LoadResult
        begin = time.perf_counter()
        for done in self._start(plan, state["epoch"]):
            if done.error is not None:
                raise done.error
            self._has_drawn |= done.drew
            after, share = planned.popleft()
            self._state, self.share, self.number = after, share, after["batch"] - 1
            self._count(done, share, time.perf_counter() - begin)
            yield done.batch
            begin = time.perf_counter()
        if planned:
            raise LoaderError(f"the loader's workers ended {len(planned)} batches too early")  # noqa: EM102
        self._state = {"epoch": state["epoch"] + 1, "batch": 0, "position": 0}

    def _plan(
        self, state: dict[str, Any], rank: int, size: int, planned: deque[tuple[dict[str, Any], Share]]
    ) -> Iterator[_LoadTask]:
        """Yield the tasks of this rank, and note what is to be after each."""
        batcher = copy.copy(self.batcher)
        for rows, after in self._batches(state, batcher):
            own_rows = batcher.split(rows, size)[rank]
            if not own_rows and not self._stand_ins:
                continue
            counted = batcher.count(own_rows) if own_rows else 0
            planned.append((after, Share(counted, batcher.count(rows))))
            if not own_rows:
                own_rows = [rows[0]._replace(weight=0.0)]
            noted: Sequence[int] | None = None
            if self._costs is not None:
                noted = self._costs.find(self.stream.order(state["epoch"]).places(positions_in(own_rows)))
            yield _LoadTask(state["epoch"], own_rows, noted=noted or ())

    def _batches(
        self, state: dict[str, Any], batcher: Batcher
    ) -> Iterator[tuple[Sequence[SampleRow], dict[str, Any]]]:
        """Yield the rows of all ranks of each batch, and the state behind it."""
        epoch, taken = state["epoch"], state["position"]
        length = self.stream.order(epoch).length
        end = _NO_END if length is None else length
        numbers = range(taken, end)

        def costly() -> Iterator[Item]:
            nonlocal taken
            for item in self._items(numbers, epoch):
                taken = item.position + 1
                yield item

        batcher.start(state.get("batcher"), lambda positions: list(self._items(positions, epoch)))
        remaining = ItemsInOrder(numbers) if batcher.cost is None else costly()
        for number in count(state["batch"]):
            try:
                rows = batcher.next_batch(remaining)
            except UnfitSampleError as error:
                where = self.stream.place(error.position, epoch=epoch).where
                raise LoaderError(f"{where}: {error}") from None  # noqa: EM102 - a place before a sentence
            if rows is None:
                return
            if isinstance(remaining, ItemsInOrder):
                taken = remaining.positions.start
            after = {"epoch": epoch, "batch": number + 1, "position": taken}
            if batcher_state := batcher.state_dict():
                after["batcher"] = batcher_state
            yield rows, after

    def steps(
        self, ranks: int = 1, *, epoch: int = 0, first: int = 0
    ) -> Iterator[Sequence[Sequence[SampleRow]]]:
        """Yield the rows of each rank, for one step of an epoch after the other.

        No sample is loaded, unless batches depend on what they cost.

        Args:
            ranks: The number of ranks.
            epoch: The epoch.
            first: The first step, from 0.

        Example:
            >>> [len(rows) for rows in next(Loader(Stream(range(10)), 4).steps(2, first=2))]
            [1, 1]
        """
        batcher = copy.copy(self.batcher)
        position, skipped = 0, first
        if isinstance(batcher, BatchSize):  # the position of a batch follows from its number
            position, skipped = first * batcher.size, 0
        state = {"epoch": epoch, "batch": 0, "position": position}
        for rows, _ in islice(self._batches(state, batcher), skipped, None):
            yield batcher.split(rows, ranks)

    def _items(self, positions: Iterable[int], epoch: int) -> Iterator[Item]:
        """Yield items with their costs, which workers compute ahead where the batcher asks for them."""
        if self.batcher.cost is None:
            yield from map(Item, positions)
            return
        rest, order, costs = iter(positions), self.stream.order(epoch), self._costs
        groups: deque[list[int]] = deque()  # those that workers look at
        group: list[int] = []  # the next one
        group_costs: list[int] | None = None

        def take() -> bool:
            nonlocal group, group_costs
            group = list(islice(rest, _COSTS_AT_ONCE))
            group_costs = None
            if costs is not None and group:
                group_costs = costs.find(order.places(group))
            return bool(group)

        def tasks() -> Iterator[_LoadTask]:
            while group and group_costs is None:
                groups.append(group)
                yield _LoadTask(epoch, costs=group)
                take()

        take()
        while group:
            if group_costs is not None:
                yield from map(Item, group, group_costs)
                take()
                continue
            for done in self._start(tasks(), epoch):
                if done.error is not None:
                    raise done.error
                looked_at = groups.popleft()
                if costs is not None:
                    costs.note(order.places(looked_at), done.batch)
                yield from map(Item, looked_at, done.batch)

    def _start(self, tasks: Iterable[_LoadTask], epoch: int) -> Iterator[_LoadResult]:
        workers = self._workers
        prefetch_factor = self._prefetch if workers else None
        loader: DataLoader[_LoadResult] = DataLoader(
            _TaskDataset(self.stream, self.batcher, skips=self._skips, has_drawn=self._has_drawn),
            batch_size=None,
            sampler=tasks,
            num_workers=workers,
            prefetch_factor=prefetch_factor,
            collate_fn=_unchanged,
            pin_memory=self._pin_memory,
            timeout=self._timeout_s,
            multiprocessing_context=self._context,
        )
        results = iterate_seeded(loader, seed=self.stream.seed, epoch=epoch, is_ours=True)
        if workers:
            return self._of_workers(results)
        return results

    def _of_workers(self, results: Iterator[_LoadResult]) -> Iterator[_LoadResult]:
        """Yield the results of workers.

        Raises:
            LoaderError: One did not come in time.
        """
        try:
            yield from results
        except RuntimeError as error:
            if "shared memory" in str(error):
                error.add_note(
                    "workers hand batches over in /dev/shm, which is full: enlarge it (docker run "
                    "--shm-size=8g), or give Loader(workers=0)"
                )
            if not self._timeout_s or "timed out" not in str(error):
                raise
            sources = ", ".join(self.stream.sources[name].where(0) for name in self.stream.sources)
            msg = (
                f"no batch came within {self._timeout_s:g} s, behind position {self._state['position']} of "
                f"epoch {self._state['epoch']}; the sources begin with {sources}; look at what holds them "
                "up, or set timeout_s"
            )
            raise LoaderError(msg) from error

    def _count(self, done: _LoadResult, share: Share, waited_s: float) -> None:
        for stats in self._counted:
            stats.batches += 1
            stats.rows += share.samples
            stats.wait_s += waited_s
            stats.skipped += len(done.skipped)
            stats.errors += done.skipped[: _MOST_ERRORS - len(stats.errors)]
            for name, value in done.measured.items():
                stats.measured[name] = stats.measured.get(name, 0.0) + value


def _launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, of the process group or of the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = LaunchEnvironment.read()
    return launched.rank, launched.world_size
