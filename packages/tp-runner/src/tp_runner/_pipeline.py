"""Pipelines: stages that pass items to each other, on shared workers or workers of their own."""

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, Unpack

from tp_core.errors import ConfigError
from tp_core.output import shows_progress

from tp_runner._engines import PoolFactory, worker_devices
from tp_runner._options import Batching, RunnerOptions, check_truth, refuse_async
from tp_runner._scheduling._pool import RunnerPool
from tp_runner._scheduling._source import MapStyle, as_iterable
from tp_runner._stats import StageStats
from tp_runner._stream import Interruption, OpenRun, ResultStream
from tp_runner._workers._work import FILTER, FLAT_MAP, MAP, Stage, StagesProgram
from tp_runner.errors import ItemError

if TYPE_CHECKING:
    from tp_core import DeviceSpec
    from tp_core.output import Progress


class Pipeline:
    """Stages in a row, which work at the same time: each one takes the results of the one before.

    Every stage reads only so far ahead as its workers need. So a slow one holds up those before it, down to
    the input. Stages that name no devices share one set of workers and take turns on it. A stage with
    ``devices`` or ``n_workers`` has workers of its own. Adding a stage returns a longer pipeline, and leaves
    this one unchanged. The workers start with the first stream and end with :meth:`close`.

    Args:
        devices: The devices of the shared workers, as for a runner.
        n_workers: How many CPU workers, in place of ``devices``.
        engine: What the workers are: ``"process"``, ``"thread"``, ``"inline"`` or ``"ray"``.
        ordered: Whether results come in the order of the items or as they come.
        progress: Whether streams show a table of the stages; "auto" on a terminal or in a notebook.
        options: The options of :class:`RunnerOptions`, for every stage; batches are a stage's own. With
            ``on_error="return"`` an error passes by the later stages and comes out in the item's place.

    Raises:
        ConfigError: An option, also one of a stage, is unknown or has a wrong value.
        DeviceError: A device, also one of a stage, does not exist here.

    Example:
        >>> pipeline = Pipeline(n_workers=2, engine="thread").flat_map(range).filter(bool).map(str)
        >>> with pipeline:
        ...     list(pipeline.stream([3, 2]))
        ['1', '2', '1']
    """

    def __init__(
        self,
        devices: "DeviceSpec" = None,
        *,
        n_workers: int | None = None,
        engine: str = "process",
        ordered: bool = True,
        progress: "Progress" = "auto",
        **options: Unpack[RunnerOptions],
    ) -> None:
        for name in ("batch", "collate", "max_wait_s"):
            if options.get(name) is not None:
                msg = (
                    f"{name}={options.get(name)!r} is given to the stage of a pipeline that works on batches"
                )
                raise ConfigError(msg)
        check_truth({"ordered": ordered}, "ordered")
        self._engine = engine
        self._ordered = ordered
        self._progress = shows_progress(progress)
        self._options = options
        self._devices = worker_devices(self._engine, devices, n_workers)
        self._stages: list[Stage] = []
        self._stats: list[StageStats] = []
        self._pools: dict[int, RunnerPool] = {}  # of each stage
        # Streams of several threads must not each start the workers.
        self._lock = threading.Lock()

    # -- stages --------------------------------------------------------------------------------

    def map(
        self,
        function: Callable[..., Any],
        *,
        init: Callable[[str], Any] | None = None,
        batch: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        devices: "DeviceSpec" = None,
        n_workers: int | None = None,
        name: str = "",
    ) -> Self:
        """Return this pipeline with one more stage, which gives one result for each item.

        Args:
            function: Applied to each item; with ``init``, to the worker's state and the item; with ``batch``,
                to batches of items.
            init: Makes the state of a worker, given its device as a string.
            batch: How many items the function gets at once; the last batch may be smaller.
            collate: Makes a batch of a list of items.
            devices: The devices of workers of its own.
            n_workers: How many CPU workers of its own, in place of ``devices``.
            name: Its name; by default the function's.
        """
        return self._add_stage(MAP, function, init, Batching.of(batch, collate), devices, n_workers, name)

    def flat_map(
        self,
        function: Callable[..., Iterable[Any]],
        *,
        init: Callable[[str], Any] | None = None,
        devices: "DeviceSpec" = None,
        n_workers: int | None = None,
        name: str = "",
    ) -> Self:
        """Return this pipeline with a stage that gives any number of results for an item; see :meth:`map`."""
        return self._add_stage(FLAT_MAP, function, init, None, devices, n_workers, name)

    def filter(
        self,
        function: Callable[..., Any],
        *,
        init: Callable[[str], Any] | None = None,
        devices: "DeviceSpec" = None,
        n_workers: int | None = None,
        name: str = "",
    ) -> Self:
        """Return this pipeline with a stage that passes on items the function is true of; see :meth:`map`."""
        return self._add_stage(FILTER, function, init, None, devices, n_workers, name)

    def _add_stage(
        self,
        kind: str,
        function: Callable[..., Any],
        init: Callable[[str], Any] | None,
        batching: Batching | None,
        devices: Any,
        n_workers: int | None,
        name: str,
    ) -> Self:
        if not callable(function):
            msg = f"a stage takes a function of an item, got {type(function).__name__}: {function!r:.80}"
            raise ConfigError(msg)
        if devices is None and n_workers is None:
            own = None
        else:
            own = worker_devices(self._engine, devices, n_workers)
        name = name or getattr(function, "__name__", type(function).__name__)
        refuse_async(function)
        refuse_async(init)
        longer = copy.copy(self)
        longer._stages = [*self._stages, Stage(name, kind, function, init, batching, own)]
        longer._stats, longer._pools, longer._lock = [], {}, threading.Lock()
        return longer

    # -- streams -------------------------------------------------------------------------------

    def stream(self, items: Iterable[Any] | MapStyle[Any]) -> ResultStream[Any]:
        """Return an iterator over the results of the last stage; closing it early ends all stages.

        Raises:
            ConfigError: The pipeline has no stage.
            NotPicklableError: A stage's function, an item or a result cannot travel between processes.
            WorkerError: The work on an item raised, or a worker's start; a note says in which stage.
            WorkerDiedError: A worker died, and was not started again.
        """
        if not self._stages:
            msg = "a pipeline needs a stage: add one with map, flat_map or filter"
            raise ConfigError(msg)
        self._open()
        runs: list[OpenRun] = []
        self._stats = stats = [
            StageStats(stage.name, stage.devices or self._devices, stage.devices is None)
            for stage in self._stages
        ]
        chunks: Iterator[list[Any]] = iter(())
        taken: Iterable[Any] = as_iterable(items)
        for place, stage in enumerate(self._stages):
            chunks = self._results(place, stage, taken, runs, stats[place])
            taken = itertools.chain.from_iterable(chunks)
        if self._progress:
            from tp_runner._progress import with_table

            chunks = with_table(chunks, stats)

        def end() -> None:
            for run in reversed(runs):
                run.end()

        def cancel(kill_after_s: float | None) -> None:
            for run in reversed(runs):
                run.cancel(None)
            if kill_after_s is not None:
                for run in reversed(runs):
                    run.cancel(kill_after_s)

        def steps() -> Generator[list[Any], None, None]:
            try:
                yield from chunks
            finally:
                end()

        generator = steps()

        def close() -> None:
            with contextlib.suppress(ValueError):  # another thread reads it, and notices
                generator.close()
            end()

        return ResultStream(
            OpenRun(generator, close, cancel, lambda: tuple(copy.copy(entry) for entry in stats))
        )

    def _results(
        self, place: int, stage: Stage, items: Iterable[Any], runs: list[OpenRun], stats: StageStats
    ) -> Generator[list[Any], None, None]:
        """Yield lists of the results of one stage, which starts with the first request."""
        run = self._pools[place].open_run(_payloads(place, stage, items, stats), ordered=self._ordered)
        runs.append(run)
        try:
            for answers in run.chunks:
                if isinstance(answers, Interruption):
                    yield answers
                    continue
                results: list[Any] = []
                for answer in answers:  # the results of one item, or the error in their place
                    if isinstance(answer, ItemError):
                        answer.add_note(_stage_note(stage))
                        results.append(answer)
                    else:
                        results += answer
                stats.given += len(results)
                yield results
        except ItemError as error:
            notes = {_stage_note(stage) for stage in self._stages}
            if notes.isdisjoint(getattr(error, "__notes__", ())):  # it passes the later stages, too
                error.add_note(_stage_note(stage))
            raise

    # -- life ----------------------------------------------------------------------------------

    def stats(self) -> tuple[StageStats, ...]:
        """Return the statistics of each stage of the newest stream so far."""
        return tuple(copy.copy(entry) for entry in self._stats)

    def _open(self) -> None:
        with self._lock:
            if self._pools:
                return
            numbered = dict(enumerate(self._stages))
            # Inline, the thread that asks does the work, and stages cannot take turns on one pool.
            own = {p: s for p, s in numbered.items() if s.devices is not None or self._engine == "inline"}
            shared = {place: stage for place, stage in numbered.items() if place not in own}
            try:
                for place, stage in own.items():
                    self._pools[place] = self._pool({place: stage}, stage.devices or self._devices)
                if shared:
                    self._pools |= dict.fromkeys(shared, self._pool(shared, self._devices))
            except BaseException:
                self._close(timeout_s=0.0)
                raise

    def _pool(self, stages: dict[int, Stage], devices: tuple[str, ...]) -> Any:
        return PoolFactory(self._engine, StagesProgram(stages), devices, self._options).open()

    def close(self, *, timeout_s: float | None = None) -> None:
        """End the workers, within ``timeout_s`` or ``end_timeout_s`` seconds; a stream starts new ones."""
        with self._lock:
            self._close(timeout_s=timeout_s)

    def _close(self, *, timeout_s: float | None) -> None:
        pools, self._pools = self._pools, {}
        with contextlib.ExitStack() as closing:  # all of them, whatever one raises
            for pool in dict.fromkeys(pools.values()):
                closing.callback(pool.close, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        timeout_s = None if kind is None else 0.0
        self.close(timeout_s=timeout_s)

    def __del__(self) -> None:
        for pool in dict.fromkeys(getattr(self, "_pools", {}).values()):
            pool.drop()


def _payloads(place: int, stage: Stage, items: Iterable[Any], stats: StageStats) -> Iterator[tuple[int, Any]]:
    """Yield the items for the workers of a stage, with its place."""
    iterator = iter(as_iterable(items))
    if stage.batching is None:
        for item in iterator:
            stats.taken += 1
            yield place, item
        return
    while part := list(itertools.islice(iterator, stage.batching.size)):
        stats.taken += len(part)
        yield place, part


def _stage_note(stage: Stage) -> str:
    return f"in the stage {stage.name!r} of the pipeline"
