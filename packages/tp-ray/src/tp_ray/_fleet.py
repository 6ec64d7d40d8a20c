"""The actors of a runner on a Ray cluster: one for each device, placed by the resources that they need."""

import contextlib
import math
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tp_core.device_types import is_counted_by_ray
from tp_core.errors import ConfigError
from tp_core.output import get_logger
from tp_runner.engines import (
    INIT,
    RESULT,
    USERS_ERRORS,
    Chunk,
    Died,
    Done,
    Event,
    Failure,
    Fleet,
    Ready,
    Settings,
    Setup,
    Surroundings,
    check_nesting,
    dump_program,
    failure_of_death,
    handle_records,
    loads_exit_result,
)

from tp_ray._actor import Answer, ChunkPlace, Ended, RayWorker, Started, import_ray, packed
from tp_ray._placement import actor_options, needs_of, require_room, reserve
from tp_ray._scaling import Scaling

_log = get_logger("tp_runner")

GRACE_S = 20.0
"""After so long a start logs that it still waits for actors: others may hold their places."""

WAKE_S = 0.02
"""Another thread cannot end Ray's wait, so a long wait is made of such short ones."""


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
        check_nesting(len(devices))
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
        events: list[Event] = []
        grace_until = time.monotonic() + GRACE_S
        while left := [worker for worker in self._starting.values() if worker in missing]:
            timeout_s = None if grace_until == math.inf else GRACE_S
            self.wait(timeout_s)
            if time.monotonic() >= grace_until:
                grace_until = math.inf
                _log.warning("still waiting for the cluster to start %d actors", len(left))
            for event in self.poll():
                if event.worker not in missing:
                    events.append(event)
                elif isinstance(event, Died):
                    if event.failure is not None or not may_restart(event):
                        self.reset()
                        raise self.error(event.worker, event.failure or failure_of_death(event))
                    self.revive(event.worker)
        return events

    def _all_needs(self) -> list[dict[str, float]]:
        resources = self._settings.resources or {}
        return [needs_of(device, resources) for device in self.devices[: self._scaling.fewest]]

    def _require_room(self) -> None:
        require_room(self._ray.nodes(), self._all_needs(), self._settings.placement)

    def _launch(self, worker: int) -> None:
        settings = self._settings
        needs = needs_of(self.devices[worker], settings.resources or {})
        kind, _, _ = self.devices[worker].partition(":")
        # its own are all it sees
        if is_counted_by_ray(kind):
            device = f"{kind}:0"
        else:
            device = self.devices[worker]
        options = actor_options(self._ray, needs, self._group, worker, settings.env)
        actor = self._ray.remote(RayWorker).options(max_concurrency=1, **options)
        surroundings = Surroundings.for_another_machine(settings.env)
        self._actors[worker] = handle = actor.remote(
            Setup(self._program, device, worker, self.size, settings, surroundings)
        )
        self._starting[handle.ready.remote()] = worker
        self._deadlines[worker] = time.monotonic() + (settings.start_timeout_s or math.inf)
        self._lost.discard(worker)

    def where(self, worker: int) -> str:
        if worker in self._actors:
            return self._nodes.get(worker, "")
        return ""

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
        if not self._leaving:
            return
        ended, _ = self._ray.wait(list(self._leaving), timeout=0)
        for reference in ended:
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
        if ended.failure:
            return [(worker, pickle.loads(ended.failure))]
        return []

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
            if deadline is None:
                deadline = late
            else:
                deadline = min(deadline, late)
        while not self._woken.is_set():
            references = [*self._starting, *self._inflight]
            if deadline is None:
                left_s = WAKE_S
            else:
                left_s = min(WAKE_S, deadline - time.monotonic())
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
