"""Workers that are actors on a Ray cluster: one for each device, placed by the resources it needs."""

import contextlib
import importlib
import logging
import math
import pickle
import time
from collections.abc import Sequence
from typing import Any

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._events import Chunk, Died, Done, Event, Ready, Timing
from tp_runner._workers._failure import INIT, RESULT, Failure, failure_to_error
from tp_runner._workers._fleet import Fleet
from tp_runner._workers._logging import handle_record
from tp_runner._workers._program import dump_program
from tp_runner._workers._ray._worker import RayWorker, packed
from tp_runner._workers._setup import Setup

__all__ = ["RayFleet", "require_room"]

_log = logging.getLogger("tp_runner")

GRACE_S = 20.0
"""After so long it is said that actors are still being waited for: others may hold their places."""

WAKE_S = 0.02
"""Ray cannot be woken up from another thread, so a longer wait is made of such short ones."""


class RayFleet(Fleet):
    """One actor for each device, in the cluster that this process is connected to.

    Each takes one CPU, and one for a CUDA device one GPU, whichever is free, as its device 0; the
    option ``resources`` says otherwise.

    An actor does not tell when it begins with an item. Where items are timed it gets one at a time,
    or one batch, and the time counts from its being sent.
    """

    most_credits = 2

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        self._ray = _import_ray()
        self.devices = devices
        self._program = dump_program(program)
        self._settings = settings
        if settings.timeout_s is not None:
            self.most_credits = self.most_items = 1
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._deadlines: dict[int, float] = {}
        self._inflight: dict[Any, tuple[int, int, int]] = {}
        self._begun: dict[int, tuple[int, float]] = {}  # the chunk of a worker, and since when
        self._woken = False

    def start(self) -> list[Event]:
        if not self._ray.is_initialized():
            self._ray.init(log_to_driver=False, include_dashboard=False)
        missing = [worker for worker in range(self.size) if worker not in self._actors]
        if missing:
            self._require_room()
        for worker in missing:
            self._launch(worker)
        others: list[Event] = []
        grace_s: float | None = GRACE_S
        while self._starting:
            self.wait(grace_s)
            events = self.poll()
            if not events and grace_s is not None:
                grace_s = None
                _log.warning("still waiting for the cluster to start %d actors", len(self._starting))
            for event in events:
                if isinstance(event, Died) and event.worker in missing:
                    self.reset()
                    failure = event.failure or Failure(INIT, "its actor died before it was ready")
                    device = self.devices[event.worker]
                    raise failure_to_error(failure, device=device, worker=event.worker)
                if event.worker not in missing:
                    others.append(event)
        return others

    def _needs(self, worker: int) -> dict[str, float]:
        """Return what a worker takes of its node, by Ray's names."""
        cuda = self.devices[worker].startswith("cuda")
        needs = {"CPU": 1.0, "GPU": 1.0 if cuda else 0.0}
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        return needs | {names.get(name, name): n for name, n in (self._settings.resources or {}).items()}

    def _require_room(self) -> None:
        require_room(self._ray.nodes(), [self._needs(worker) for worker in range(self.size)])

    def _launch(self, worker: int) -> None:
        settings = self._settings
        device = "cuda:0" if self.devices[worker].startswith("cuda") else self.devices[worker]
        needs = self._needs(worker)
        actor = self._ray.remote(RayWorker).options(
            num_cpus=needs.pop("CPU"),
            num_gpus=needs.pop("GPU"),
            memory=needs.pop("memory", None),
            resources=needs,
            max_concurrency=1,
        )
        setup = Setup(
            self._program,
            device,
            worker,
            self.size,
            settings.threads,
            False,
            settings.batching,
            settings.log_level,
            settings.seed,
        )
        self._actors[worker] = handle = actor.remote(setup)
        self._starting[handle.ready.remote()] = worker
        self._deadlines[worker] = time.monotonic() + (settings.start_timeout_s or math.inf)

    def revive(self, worker: int) -> None:
        try:
            self._require_room()
        except ConfigError as error:  # a node was lost, and the cluster may bring another one
            _log.warning("worker %d waits for a place: %s", worker, error)
        self._launch(worker)

    def ready(self, worker: int) -> bool:
        # One that is starting may wait for its place forever; the others go on without it.
        return worker in self._actors and worker not in self._starting.values()

    def alive(self, worker: int) -> bool:
        return worker in self._actors

    def send(self, worker: int, chunk: Chunk) -> None:
        items, _ = packed(chunk.items)
        chunk.nbytes = len(items)
        reference = self._actors[worker].work.remote(items, len(chunk.items), chunk.start)
        self._inflight[reference] = worker, chunk.seq, len(chunk.items)
        self._begun[worker] = chunk.seq, time.monotonic()

    def started(self, worker: int) -> tuple[int, float] | None:
        return self._begun.get(worker)

    def kill(self, worker: int) -> None:
        self._ray.kill(self._actors[worker])

    def wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._starting:
            late = min(self._deadlines[worker] for worker in self._starting.values())
            deadline = late if deadline is None else min(deadline, late)
        while not self._woken:
            references = [*self._starting, *self._inflight]
            left_s = WAKE_S if deadline is None else min(WAKE_S, deadline - time.monotonic())
            if left_s <= 0:
                break
            if references:
                ready, _ = self._ray.wait(references, num_returns=1, timeout=left_s)
                if ready:
                    break
            else:
                time.sleep(left_s)
        self._woken = False

    def poll(self) -> list[Event]:
        events: list[Event] = []
        self._end_late_starts(events)
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
            failure = None
            try:
                data, records = self._ray.get(reference)
                failure = pickle.loads(data) if data else None
            except self._ray.exceptions.RayError:
                self._on_death(worker, events)
                return
            self._log(records)
            if failure is None:
                events.append(Ready(worker))
            else:
                self._actors.pop(worker, None)
                events.append(Died(worker, None, failure=failure))
            return
        entry = self._inflight.get(reference)
        if entry is None:  # its worker's death was noticed by another one
            return
        worker, seq, n_items = entry
        try:
            data, failed, timing, records = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            self._on_death(worker, events)
            return
        del self._inflight[reference]
        self._begun.pop(worker, None)
        self._log(records)
        try:
            results = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, RESULT)] * n_items, True
        events.append(Done(worker, seq, results, failed, Timing(*timing), len(data)))

    def _on_death(self, worker: int, events: list[Event]) -> None:
        if worker not in self._actors:
            return
        del self._actors[worker]
        mine = [(r, e) for r, e in self._inflight.items() if e[0] == worker]
        for reference, _ in mine:
            del self._inflight[reference]
        current = (mine[0][1][1], 0) if mine else None
        _, began = self._begun.pop(worker, (0, 0.0))
        events.append(Died(worker, None, current, began=began))

    @staticmethod
    def _log(records: list[logging.LogRecord]) -> None:
        for record in records:
            handle_record(record)

    def wake(self) -> None:
        self._woken = True

    def reset(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._starting.clear()
        self._inflight.clear()
        self._begun.clear()

    def close(self, *, timeout_s: float) -> None:
        actors = {worker: actor for worker, actor in self._actors.items() if self.ready(worker)}
        failures = []
        if timeout_s > 0 and actors:
            ends = {actor.end.remote(): worker for worker, actor in actors.items()}
            done, _ = self._ray.wait(list(ends), num_returns=len(ends), timeout=timeout_s)
            for reference in done:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    data, records = self._ray.get(reference)
                    self._log(records)
                    if data:
                        failures.append((ends[reference], pickle.loads(data)))
        if self._ray.is_initialized():
            self.reset()
        for worker, failure in failures:
            raise failure_to_error(failure, device=self.devices[worker], worker=worker)


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        msg = "engine 'ray' needs Ray; pip install tp-runner[ray]"
        raise ConfigError(msg) from error


def require_room(nodes: Sequence[dict[str, Any]], workers: Sequence[dict[str, float]]) -> None:
    """Check that the living nodes of a cluster, if nobody else used them, could hold all workers.

    An actor that fits nowhere would be waited for without an end.

    Raises:
        ConfigError: There is no room for one of them.
    """
    left = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    for n_placed, needs in enumerate(workers):
        node = next((n for n in left if all(n.get(name, 0.0) >= k for name, k in needs.items())), None)
        if node is None:
            wanted = ", ".join(f"{k:g} {name}" for name, k in needs.items() if k)
            msg = (
                f"the cluster has room for {n_placed} of {len(workers)} actors, and none for another one "
                f"with {wanted}; ask for fewer devices or other resources=, or add nodes first"
            )
            raise ConfigError(msg)
        for name, k in needs.items():
            node[name] = node.get(name, 0.0) - k
