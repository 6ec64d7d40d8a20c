"""Actors on a Ray cluster: their places, how many there are, and what runs in each."""

import importlib
import logging
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tp_core.errors import ConfigError

from tp_runner.internal import (
    END,
    INIT,
    ITEM,
    USERS_ERRORS,
    Failure,
    Setup,
    Task,
    Timing,
    become_worker,
    dumps_exit_result,
    end_work,
    limit_torch,
    pack_results,
    prepare_process,
    run_chunk,
    set_current_task,
)

# -- Where actors go, and how many ------------------------------------------------------------

Needs = dict[str, float]


def import_ray() -> Any:
    """Import Ray, which is an extra.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        msg = "engine 'ray' needs Ray; pip install tp-runner[ray]"
        raise ConfigError(msg) from error


def needs_of(device: str, resources: Mapping[str, float]) -> Needs:
    """Return what a worker takes of its node, by Ray's names."""
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
        options["runtime_env"] = {"env_vars": known}  # what is None the worker itself removes
    return options


def require_room(nodes: Sequence[dict[str, Any]], workers: Sequence[Needs], placement: str | None) -> None:
    """Check that the living nodes of a cluster, if nobody else used them, could hold all workers.

    An actor that fits nowhere would be waited for without an end.

    Args:
        nodes: What Ray says of each node.
        workers: What each worker takes, by Ray's names.
        placement: How they are to be placed.

    Raises:
        ConfigError: There is no room for one of them.
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
    """Return how many workers find a place, and what the first one takes that finds none."""
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
    """Hold a place for every worker: a placement group, which Ray moves when a node is lost.

    Raises:
        ConfigError: A worker takes nothing, or there was no place for all of them in time.
    """
    bundles = [{name: k for name, k in needs.items() if k} for needs in workers]
    if not all(bundles):
        msg = f"placement={placement!r} holds what workers take, and resources= lets one take nothing"
        raise ConfigError(msg)
    group = ray.util.placement_group(bundles, strategy=placement.upper())
    began = time.monotonic()
    while not group.wait(1):  # in turns, so that an interrupt is seen
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            ray.util.remove_placement_group(group)
            msg = (
                f"the cluster had no place for {len(bundles)} workers placed by {placement!r} after "
                f"start_timeout_s={timeout_s}; others may hold them"
            )
            raise ConfigError(msg)
    return group


GROW_S = 1.0
"""After so long with every worker busy there is one more."""
BREATH_S = 0.1
"""For so long a worker may be between two items, and still counts as busy."""
IDLE_S = 10.0
"""After so long without anything to do a worker beyond the fewest ends."""


class Scaling:
    """Says when another worker is worth starting, and which one has nothing to do.

    Args:
        fewest: How many workers there are at least.
        most: How many at most.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest = fewest
        self._most = most
        self._busy_since: float | None = None
        self._free_since: float | None = None  # since when not all of them have something to do
        self._idle_since: dict[int, float] = {}

    @property
    def interval_s(self) -> float | None:
        """How often to look; ``None`` where there is nothing to decide."""
        return GROW_S if self.fewest < self._most else None

    def worker_to_start(
        self, running: Collection[int], busy: Collection[int], lost: Collection[int]
    ) -> int | None:
        """Return the number of a worker to start now, if another one is wanted.

        Args:
            running: The workers there are, those that are starting among them.
            busy: Those that have something to do.
            lost: Those that died and are not to be started again.
        """
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
        """Return the workers that have had nothing to do for long, and are more than the fewest."""
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
    """The answer of an actor that has started, or has not: then it has a pickled failure."""

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
    """The answer of an actor that has ended: a pickled failure, or what the end returned."""

    failure: bytes
    returned: bytes
    records: list[logging.LogRecord]


class RayWorker:
    """One worker; speaks in bytes, so that errors are ours and not Ray's."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._records: list[logging.LogRecord] = []
        self._work: Any = None
        self._task = Task(setup.settings, [0, 0, 0], ())
        set_current_task(self._task, of_process=True)
        self._waiting = time.monotonic()

    def ready(self) -> Started:
        """Start the program."""
        ray = import_ray()
        failure = b""
        try:
            prepare_process(self._setup, self._records.append)
            program = pickle.loads(self._setup.program)
            limit_torch(self._setup.threads)  # it may have been imported just now
            become_worker(self._setup.info)
            self._work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, INIT), 5)
        node = ray.get_runtime_context().get_node_id()
        where = f"node {node[:8]} ({ray.util.get_node_ip_address()})"
        return Started(failure, self._take_records(), where)

    def work(self, data: bytes, n_items: int, place: ChunkPlace) -> Answer:
        """Work on a chunk."""
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
        """End the program."""
        failure = returned = b""
        try:
            returned = dumps_exit_result(end_work(self._work))
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, END), 5)
        return Ended(failure, returned, self._take_records())

    def _take_records(self) -> list[logging.LogRecord]:
        records = self._records[:]
        del self._records[: len(records)]  # in place: the handler keeps this very list
        return records


def packed(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle an object by itself, with what its receiver cannot import."""
    import cloudpickle

    return cloudpickle.dumps(obj, protocol=5), []
