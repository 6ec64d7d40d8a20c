"""The engine `ray`: actors on a Ray cluster, one for each device, placed by the resources that they need.

The registry finds it by its hook; of this package it imports public names alone.
"""

import contextlib
import importlib
import importlib.util
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tp_core.errors import ConfigError
from tp_core.plugins import Verdict

from tp_runner.internal import (
    END,
    INIT,
    ITEM,
    RESULT,
    USERS_ERRORS,
    Chunk,
    Died,
    Done,
    Event,
    Failure,
    Fleet,
    FleetEngine,
    Ready,
    Settings,
    Setup,
    Task,
    Timing,
    become_worker,
    dump_program,
    dumps_by_value,
    dumps_exit_result,
    end_work,
    failure_of_death,
    handle_records,
    limit_torch,
    loads_exit_result,
    pack_results,
    prepare_process,
    run_chunk,
    set_current_task,
)

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("tp_runner")

GRACE_S = 20.0
"""After so long a start logs that it still waits for actors: others may hold their places."""

WAKE_S = 0.02
"""Another thread cannot end Ray's wait, so a long wait is made of such short ones."""


class RayEngine(FleetEngine):
    """The engine of actors on a Ray cluster."""

    name = "ray"
    score = 20
    summary = "one actor on a Ray cluster for each device"
    unfit: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_items_per_worker", "max_memory_per_worker"), "only processes are replaced"),
        **dict.fromkeys(("preload", "start_method"), "Ray starts the workers"),
        "cpus": "Ray places the workers; resources={'num_cpus': 2} says how many cores one takes",
    }
    is_remote = True
    copies_work = True
    start_timeout_s = None  # an actor may wait for its place for any time

    def assess(self, devices: "Sequence[torch.device]") -> Verdict:
        """Fit where Ray is installed; never better than processes for one machine."""
        if importlib.util.find_spec("ray") is None:
            return Verdict.unfit("ray is not installed", remedy="pip install tp-runner[ray]")
        return super().assess(devices)

    def make_fleet(self, program: Any, devices: tuple[str, ...], settings: Settings) -> Fleet:
        return RayFleet(program, devices, settings)


class _Sent(NamedTuple):
    worker: int
    seq: int
    n_items: int


class RayFleet(Fleet):
    """One actor for each device, in this process's cluster.

    Each takes one CPU. An actor for a CUDA device also takes one GPU, any free one, as its device 0. The
    option ``resources`` changes that.

    With ``min_workers`` there are more of them only while all are busy.

    An actor does not report when it begins an item. Where items are timed it gets one at a time,
    or one batch, and the time counts from the send.
    """

    most_credits = 2

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        self._ray = import_ray()
        super().__init__(devices)
        self._program = dump_program(program)
        self._settings = settings
        if settings.timeout_s is not None:
            self.most_credits = self.most_items = 1
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._deadlines: dict[int, float] = {}
        self._inflight: dict[Any, _Sent] = {}
        self._started_at: dict[int, tuple[int, float]] = {}  # the chunk of a worker, and since when
        self._woken = threading.Event()
        self._group: Any = None  # the placement group of all actors
        self._nodes: dict[int, str] = {}
        self._lost: set[int] = set()  # died, and not started again
        self._leaving: dict[Any, tuple[int, Any]] = {}  # idle actors that end
        self._scaling = Scaling(settings.min_workers or self.size, self.size)

    def start(self, may_restart: Callable[[Died], bool]) -> list[Event]:
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        missing = [worker for worker in range(self._scaling.fewest) if worker not in self._actors]
        if missing:
            self._require_room()
        placement = self._settings.placement
        if placement is not None and self._group is None:
            limit_s = self._settings.start_timeout_s
            self._group = reserve(self._ray, self._all_needs(), placement, limit_s)
        for worker in missing:
            self._launch(worker)
        others: list[Event] = []
        grace_until = time.monotonic() + GRACE_S
        while left := [worker for worker in self._starting.values() if worker in missing]:
            self.wait(None if grace_until == math.inf else GRACE_S)
            if time.monotonic() >= grace_until:
                grace_until = math.inf
                _log.warning("still waiting for the cluster to start %d actors", len(left))
            for event in self.poll():
                if event.worker not in missing:
                    others.append(event)
                elif isinstance(event, Died):
                    if event.failure is not None or not may_restart(event):
                        self.reset()
                        raise self.error(event.worker, event.failure or failure_of_death(event))
                    self.revive(event.worker)
        return others

    def _all_needs(self) -> list[dict[str, float]]:
        resources = self._settings.resources or {}
        return [needs_of(device, resources) for device in self.devices[: self._scaling.fewest]]

    def _require_room(self) -> None:
        require_room(self._ray.nodes(), self._all_needs(), self._settings.placement)

    def _launch(self, worker: int) -> None:
        settings = self._settings
        needs = needs_of(self.devices[worker], settings.resources or {})
        device = "cuda:0" if self.devices[worker].startswith("cuda") else self.devices[worker]
        options = actor_options(self._ray, needs, self._group, worker, settings.env)
        actor = self._ray.remote(RayWorker).options(max_concurrency=1, **options)
        self._actors[worker] = handle = actor.remote(
            Setup(self._program, device, worker, self.size, settings)
        )
        self._starting[handle.ready.remote()] = worker
        self._deadlines[worker] = time.monotonic() + (settings.start_timeout_s or math.inf)
        self._lost.discard(worker)

    def where(self, worker: int) -> str:
        return self._nodes.get(worker, "") if worker in self._actors else ""

    def _scale(self) -> None:
        busy = {sent.worker for sent in self._inflight.values()}
        leaving = {worker for worker, _ in self._leaving.values()}
        new = self._scaling.worker_to_start(self._actors, busy, self._lost | leaving)
        if new is not None:
            self._launch(new)
            self._deadlines[new] = math.inf  # the others do without it while the cluster has no place
        ready = [worker for worker in self._actors if self.ready(worker)]
        for worker in self._scaling.idle_workers(ready, busy):
            actor = self._actors.pop(worker)
            self._leaving[actor.end.remote()] = worker, actor
        for reference in self._ray.wait(list(self._leaving), timeout=0)[0] if self._leaving else ():
            worker, actor = self._leaving.pop(reference)
            # A warning: nobody waits for this end, so nobody could catch an error.
            for _, failure in self._finish_worker(worker, reference):
                _log.warning("worker %d had nothing to do, and its end failed: %s", worker, failure.summary)
            self._ray.kill(actor)

    def _finish_worker(self, worker: int, reference: Any) -> list[tuple[int, Failure]]:
        """Note the value of a worker's orderly end; return its failure, if there is one."""
        ended = Ended(b"", b"", [])
        with contextlib.suppress(self._ray.exceptions.RayError):
            ended = self._ray.get(reference)
        handle_records(ended.records)
        self._endings[worker].append(loads_exit_result(ended.returned))
        return [(worker, pickle.loads(ended.failure))] if ended.failure else []

    def revive(self, worker: int) -> None:
        try:
            self._require_room()
        except ConfigError as error:  # a node was lost, and the cluster may bring another one
            _log.warning("worker %d waits for a place: %s", worker, error)
        self._launch(worker)

    def ready(self, worker: int) -> bool:
        # A starting actor may wait for its place forever; the others work without it.
        return worker in self._actors and worker not in self._starting.values()

    def alive(self, worker: int) -> bool:
        return worker in self._actors

    def send(self, worker: int, chunk: Chunk) -> None:
        items, _ = packed(chunk.items)
        chunk.nbytes = len(items)
        place = ChunkPlace(chunk.start, chunk.run, chunk.sent - 1)
        reference = self._actors[worker].work.remote(items, len(chunk.items), place)
        self._inflight[reference] = _Sent(worker, chunk.seq, len(chunk.items))
        self._started_at[worker] = chunk.seq, time.monotonic()

    def started(self, worker: int) -> tuple[int, float] | None:
        return self._started_at.get(worker)

    def kill(self, worker: int) -> None:
        self._ray.kill(self._actors[worker])

    def wait(self, timeout_s: float | None) -> None:
        limits = [limit for limit in (timeout_s, self._scaling.interval_s) if limit is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        if self._starting:
            late = min(self._deadlines[worker] for worker in self._starting.values())
            deadline = late if deadline is None else min(deadline, late)
        while not self._woken.is_set():
            references = [*self._starting, *self._inflight]
            left_s = WAKE_S if deadline is None else min(WAKE_S, deadline - time.monotonic())
            if left_s <= 0:
                break
            if references:
                ready, _ = self._ray.wait(references, num_returns=1, timeout=left_s)
                if ready:
                    break
            else:
                self._woken.wait(left_s)
        self._woken.clear()

    def poll(self) -> list[Event]:
        events: list[Event] = []
        self._end_late_starts(events)
        if self._scaling.interval_s is not None:
            self._scale()
        references = [*self._starting, *self._inflight]
        if references:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
            for reference in ready:
                self._take(reference, events)
        return events

    def _end_late_starts(self, events: list[Event]) -> None:
        now = time.monotonic()
        for reference, worker in [*self._starting.items()]:
            if now >= self._deadlines[worker]:
                del self._starting[reference]
                self._ray.kill(self._actors.pop(worker))
                limit = self._settings.start_timeout_s
                failure = Failure(INIT, f"it was not ready, or had no place, after start_timeout_s={limit}")
                events.append(Died(worker, None, failure=failure))

    def _take(self, reference: Any, events: list[Event]) -> None:
        if reference in self._starting:
            worker = self._starting.pop(reference)
            try:
                started: Started = self._ray.get(reference)
            except self._ray.exceptions.RayError:
                self._on_death(worker, events, was_ready=False)
                return
            self._nodes[worker] = started.node
            handle_records(started.records)
            if started.failure:
                self._actors.pop(worker, None)
                events.append(Died(worker, None, failure=pickle.loads(started.failure)))
            else:
                events.append(Ready(worker))
            return
        sent = self._inflight.get(reference)
        if sent is None:  # another reference has reported the death of its worker
            return
        try:
            answer: Answer = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            self._on_death(sent.worker, events)
            return
        del self._inflight[reference]
        self._started_at.pop(sent.worker, None)
        handle_records(answer.records)
        failed = answer.has_failures
        try:
            results = pickle.loads(answer.results)
        except USERS_ERRORS as error:
            results, failed = [Failure.of(error, RESULT)] * sent.n_items, True
        nbytes = len(answer.results)
        events.append(Done(sent.worker, sent.seq, results, failed, answer.timing, nbytes))

    def _on_death(self, worker: int, events: list[Event], *, was_ready: bool = True) -> None:
        if worker not in self._actors:
            return
        del self._actors[worker]
        self._lost.add(worker)
        if was_ready:
            self._endings[worker].append(None)
        lost = {ref: sent for ref, sent in self._inflight.items() if sent.worker == worker}
        for reference in lost:
            del self._inflight[reference]
        # Its oldest chunk was at work, as an actor takes them in turn.
        current = next(((sent.seq, 0) for sent in lost.values()), None)
        _, began = self._started_at.pop(worker, (0, 0.0))
        events.append(Died(worker, None, current, began=began, was_ready=was_ready))

    def wake(self) -> None:
        self._woken.set()

    def reset(self) -> None:
        for worker, actor in (*self._actors.items(), *self._leaving.values()):
            self._ray.kill(actor)
            if worker not in self._starting.values():
                self._endings[worker].append(None)
        self._leaving.clear()
        self._actors.clear()
        self._starting.clear()
        self._inflight.clear()
        self._started_at.clear()

    def close(self, *, timeout_s: float) -> None:
        actors = {worker: actor for worker, actor in self._actors.items() if self.ready(worker)}
        failures: list[tuple[int, Failure]] = []
        if timeout_s > 0 and (actors or self._leaving):
            ends = {actor.end.remote(): worker for worker, actor in actors.items()}
            ends |= {reference: worker for reference, (worker, _) in self._leaving.items()}
            done, late = self._ray.wait(list(ends), num_returns=len(ends), timeout=timeout_s)
            self.warn_not_ended((ends[reference] for reference in late), timeout_s)
            for reference in done:
                failures += self._finish_worker(ends[reference], reference)
                _, leaving = self._leaving.pop(reference, (0, None))
                self._ray.kill(leaving or self._actors.pop(ends[reference]))
        if self._ray.is_initialized():
            self.reset()
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
                self._group = None
        for worker, failure in failures:
            raise self.error(worker, failure)


# -- Placement and scaling --------------------------------------------------------------------

Needs = dict[str, float]


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        msg = "engine 'ray' needs Ray; pip install tp-runner[ray]"
        raise ConfigError(msg) from error


def needs_of(device: str, resources: Mapping[str, float]) -> Needs:
    """Return the resources that a worker takes of its node, by Ray's names."""
    needs = {"CPU": 1.0, "GPU": 1.0 if device.startswith("cuda") else 0.0}
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return needs | {names.get(name, name): n for name, n in resources.items()}


def actor_options(
    ray: Any, needs: Needs, group: Any, index: int, env: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return Ray's options of an actor: its resources, its place in a group, its environment."""
    rest = {name: n for name, n in needs.items() if name not in {"CPU", "GPU", "memory"}}
    options: dict[str, Any] = {
        "num_cpus": needs["CPU"],
        "num_gpus": needs["GPU"],
        "memory": needs.get("memory"),
        "resources": rest,
    }
    if group is not None:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options["scheduling_strategy"] = strategy(group, placement_group_bundle_index=index)
    if known := {name: value for name, value in env.items() if value is not None}:
        options["runtime_env"] = {"env_vars": known}  # prepare_process removes variables that are None
    return options


def require_room(nodes: Sequence[dict[str, Any]], workers: Sequence[Needs], placement: str | None) -> None:
    """Check that the living nodes of a cluster, if nobody else used them, could hold all workers.

    An actor that fits nowhere would be waited for without an end.
    """
    left = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    if placement == "strict_pack":
        tried = [_count_placed([node], workers) for node in left or [{}]]
        n_placed, needs = max(tried, key=lambda found: found[0])
    else:
        n_placed, needs = _count_placed(left, workers, once=placement == "strict_spread")
    if n_placed < len(workers):
        wanted = ", ".join(f"{k:g} {name}" for name, k in needs.items() if k)
        how = f" placed by {placement!r}" if placement else ""
        msg = (
            f"the cluster has room for {n_placed} of {len(workers)} actors{how}, and none for another one "
            f"with {wanted}; ask for fewer devices or other resources=, or add nodes first"
        )
        raise ConfigError(msg)


def _count_placed(nodes: list[Needs], workers: Sequence[Needs], *, once: bool = False) -> tuple[int, Needs]:
    """Return how many workers find a place, and the resources of the first that finds none."""
    left = [dict(node) for node in nodes]
    for n_placed, needs in enumerate(workers):
        node = next((n for n in left if all(n.get(name, 0.0) >= k for name, k in needs.items())), None)
        if node is None:
            return n_placed, needs
        for name, k in needs.items():
            node[name] = node.get(name, 0.0) - k
        if once:
            left.remove(node)
    return len(workers), {}


def reserve(ray: Any, workers: Sequence[Needs], placement: str, timeout_s: float | None) -> Any:
    """Hold a place for every worker: a placement group, which Ray moves when a node is lost."""
    bundles = [{name: k for name, k in needs.items() if k} for needs in workers]
    if not all(bundles):
        msg = f"placement={placement!r} holds what workers take, and resources= lets one take nothing"
        raise ConfigError(msg)
    group = ray.util.placement_group(bundles, strategy=placement.upper())
    began = time.monotonic()
    while not group.wait(1):  # in turns of a second, so that an interrupt is handled
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            ray.util.remove_placement_group(group)
            msg = (
                f"the cluster had no place for {len(bundles)} workers placed by {placement!r} after "
                f"start_timeout_s={timeout_s}; others may hold them"
            )
            raise ConfigError(msg)
    return group


GROW_S = 1.0
"""After so long with every worker busy another one starts."""
BREATH_S = 0.1
"""For so long a worker between two items still counts as busy: else a fleet with items of milliseconds would
never grow (test_a_worker_between_two_items_counts_as_busy)."""
IDLE_S = 10.0
"""After so long without work a worker beyond the fewest ends."""


class Scaling:
    """The growth and shrinkage of a fleet: when another worker starts, and which idle one ends."""

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest = fewest
        self._most = most
        self._busy_since: float | None = None
        self._free_since: float | None = None  # since when not all of them are busy
        self._idle_since: dict[int, float] = {}

    @property
    def interval_s(self) -> float | None:
        """The time between two decisions; ``None`` where there is nothing to decide."""
        return GROW_S if self.fewest < self._most else None

    def worker_to_start(
        self, running: Collection[int], busy: Collection[int], lost: Collection[int]
    ) -> int | None:
        now = time.monotonic()
        if len(busy) == len(running):
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        if self._free_since is not None and now - self._free_since >= BREATH_S:
            self._busy_since = None
            return None
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since < GROW_S:
            return None
        self._busy_since = None
        return next((n for n in range(self._most) if n not in running and n not in lost), None)

    def idle_workers(self, ready: Collection[int], busy: Collection[int]) -> list[int]:
        """Return the workers beyond the fewest that have been idle for long."""
        now = time.monotonic()
        self._idle_since = {n: self._idle_since.get(n, now) for n in ready if n not in busy}
        late = [n for n, since in self._idle_since.items() if n >= self.fewest and now - since >= IDLE_S]
        for n in late:
            del self._idle_since[n]
        return late


# -- The actor --------------------------------------------------------------------------------


class ChunkPlace(NamedTuple):
    """The place of a chunk's first item in the input, its run, and how often it was sent before."""

    start: int
    run: int
    attempt: int


class Started(NamedTuple):
    """The answer of an actor after its start, with a pickled failure if it has failed."""

    failure: bytes
    records: list[logging.LogRecord]
    node: str


class Answer(NamedTuple):
    """The answer to a chunk: its pickled results, and the log records up to now."""

    results: bytes
    has_failures: bool
    timing: Timing
    records: list[logging.LogRecord]


class Ended(NamedTuple):
    """The answer of an actor after its end: a pickled failure, or the pickled value of the end."""

    failure: bytes
    returned: bytes
    records: list[logging.LogRecord]


class RayWorker:
    """One actor. It takes and returns bytes, so that pickling errors are ours and not Ray's."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._records: list[logging.LogRecord] = []
        self._work: Any = None
        self._task = Task(setup.settings, [0, 0, 0], ())
        set_current_task(self._task, of_process=True)
        self._waiting = time.monotonic()

    def ready(self) -> Started:
        ray = import_ray()
        failure = b""
        try:
            prepare_process(self._setup, self._records.append)
            program = pickle.loads(self._setup.program)
            limit_torch(self._setup.threads)  # the program may have imported torch just now
            become_worker(self._setup.info)
            self._work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, INIT), 5)
        node = ray.get_runtime_context().get_node_id()
        where = f"node {node[:8]} ({ray.util.get_node_ip_address()})"
        return Started(failure, self._take_records(), where)

    def work(self, data: bytes, n_items: int, place: ChunkPlace) -> Answer:
        began = time.monotonic()
        waited_s = began - self._waiting
        try:
            items = pickle.loads(data)
        except USERS_ERRORS as error:
            results, failed = [Failure.of(error, ITEM)] * n_items, True
        else:
            self._task.begin(*place)
            results, failed = run_chunk(self._work, items, self._task)
        worked_s = time.monotonic() - began
        data, _, unpicklable = pack_results(results, packed)
        self._waiting = time.monotonic()
        return Answer(data, failed or unpicklable, Timing(began, waited_s, worked_s), self._take_records())

    def end(self) -> Ended:
        failure = returned = b""
        try:
            returned = dumps_exit_result(end_work(self._work))
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, END), 5)
        return Ended(failure, returned, self._take_records())

    def _take_records(self) -> list[logging.LogRecord]:
        records = self._records[:]
        del self._records[: len(records)]  # in place: the handler appends to this very list
        return records


def packed(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle an object, with definitions that its receiver cannot import; without buffers apart."""
    return dumps_by_value(obj, protocol=5), []
