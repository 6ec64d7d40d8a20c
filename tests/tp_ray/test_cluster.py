"""The same runners on a Ray cluster of two nodes, started here."""

import decimal
import functools
import importlib
import logging
import os
import stat
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_ray import _scaling  # private: it waits for a second, and for ten, before it changes its size
from tp_runner import (
    ItemTimeoutError,
    NotPicklableError,
    OrderedRunner,
    Pipeline,
    UnorderedRunner,
    WorkerDiedError,
    WorkerError,
    worker,
)
from tp_testing import EngineConformance

from tests.tp_runner.registered import engine_of

ray = pytest.importorskip("ray", reason="Ray is tp-ray's alone")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900, method="signal"),
]

PATIENCE_S = 500  # for what only a machine with far more work than cores lets take so long

RAYS_PATIENCE = {
    "RAY_agent_register_timeout_ms": str(1000 * PATIENCE_S),
    "RAY_worker_register_timeout_seconds": str(PATIENCE_S),
    "RAY_health_check_timeout_ms": str(100 * PATIENCE_S),
    "RAY_memory_monitor_refresh_ms": "0",  # others may fill the memory; Ray would end our actors for it
}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAYS_PATIENCE.items():
            patch.setenv(name, value)
        services = importlib.import_module("ray._private.services")
        patch.setattr(services, "get_node", _patiently(services.get_node))
        cluster = _cluster_in_the_end()
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _cluster_in_the_end():
    """Start a cluster; again, where Ray gave up: it has some limits that nobody can change."""
    from ray.cluster_utils import Cluster

    deadline = time.monotonic() + PATIENCE_S
    while True:
        cluster = Cluster()
        try:
            cluster.add_node(wait=False, num_cpus=2)
            cluster.wait_for_nodes(PATIENCE_S)  # the head is the first one that they all know
            cluster.add_node(wait=False, num_cpus=2, resources={"special": 2})
            cluster.wait_for_nodes(PATIENCE_S)
            ray.init(address=cluster.address, log_to_driver=False)
            return cluster
        except Exception:  # Ray raises no other
            ray.shutdown()
            cluster.shutdown()
            if time.monotonic() > deadline:
                raise


def _patiently(get_node):
    """Have what starts a node wait for longer than its 30 seconds: it gives up when this fails then.

    Not for all of the time: what it waits for may have ended.
    """

    @functools.wraps(get_node)
    def in_the_end(*arguments):
        deadline = time.monotonic() + PATIENCE_S / 4
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return in_the_end


def _wait_for_nodes(n_nodes):
    """Wait until the cluster knows of so many living nodes."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(node["Alive"] for node in ray.nodes()) != n_nodes:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("cluster")
class TestRay(EngineConformance):
    engine = type(engine_of("ray"))


class Work:
    @staticmethod
    def producer_init(device, cfg):
        cfg.offset = 1000

    @staticmethod
    def producer_work(device, cfg, item):
        match item:
            case int():
                return item + cfg.offset
            case ("node",):
                time.sleep(0.02)
                return ray.get_runtime_context().get_node_id()
            case ("sleep", seconds):
                return time.sleep(seconds)
            case ("log", text):
                return logging.getLogger("far").info(text)
            case ("warn", text):
                return warnings.warn(text, stacklevel=1)
            case ("raise", text):
                raise ValueError(text)
            case ("return-lock",):
                import threading

                return threading.Lock()
            case ("die-once", path):
                if not Path(path).exists():
                    Path(path).touch()
                    os._exit(1)
                return "survived"
            case ("die",):
                os._exit(1)

    @staticmethod
    def producer_end(device, cfg):
        if "path" in cfg:
            Path(cfg.path, str(os.getpid())).touch()


class Ordered(Work, OrderedRunner):
    pass


class Unordered(Work, UnorderedRunner):
    pass


class StartsOnce(Ordered):
    @staticmethod
    def producer_init(device, cfg):
        n_starts = len(list(Path(cfg.starts).iterdir()))
        Path(cfg.starts, str(n_starts)).touch()
        if n_starts:
            os._exit(1)


class EndsBadly(Ordered):
    @staticmethod
    def producer_end(device, cfg):
        Path(cfg.path, str(os.getpid())).touch()
        if worker().number == 2:
            raise OSError("cannot end")


def test_results_are_those_of_map_on_both_nodes(cluster, tmp_path):
    with Ordered(3, {"path": str(tmp_path)}, engine="ray") as runner:
        assert list(runner.stream(range(2000))) == list(range(1000, 3000))
        nodes = set(runner.stream([("node",)] * 60))
        assert len(nodes) == 2
        assert sum(worker.items for worker in runner.stats().workers) == 2060
    assert len(list(tmp_path.iterdir())) == 3
    with Unordered(2, engine="ray") as runner:
        assert sorted(runner.stream(i for i in range(500))) == list(range(1000, 1500))


def test_what_their_ends_return_comes_back_in_the_order_of_their_numbers(cluster, tmp_path):
    class Counts(Ordered):
        @staticmethod
        def producer_end(device, cfg):
            return "ended", worker().number

    with Counts(3, engine="ray") as runner:
        list(runner.stream(range(9)))
        assert runner.exit_results == []
    assert runner.exit_results == [("ended", 0), ("ended", 1), ("ended", 2)]
    with Counts(2, engine="ray", max_restarts=1) as runner:
        assert list(runner.stream([("die-once", str(tmp_path / "died"))])) == ["survived"]
    results = runner.exit_results  # the one in its place may have been starting still, and had no end
    assert results.count(None) == 1  # the one that died
    assert {result[1] for result in results if result} <= {0, 1}
    assert any(results)


def test_workers_have_the_variables_that_they_are_given(cluster, monkeypatch):
    monkeypatch.setenv("SIZE", "7")

    def read(names):
        return [os.environ.get(name) for name in names]

    env = {"COLOR": "red", "RAY_CLIENT_MODE": None, "SIZE": None}
    results = tp_runner.map(read, [["COLOR", "SIZE", *env]], n_workers=1, engine="ray", env=env)
    assert list(results) == [["red", None, "red", None, None]]


def look_around(names):
    """Return what an actor has of its program; a folder of its path may not exist."""
    path = Path(tempfile.mkdtemp()) / "file"
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    zone = time.strftime("%Z", time.localtime(0))
    third = str(decimal.Decimal(1) / 3)
    return [name in sys.path for name in names], mode, zone, third, hash("text")


def test_workers_have_what_is_the_same_on_every_machine(cluster, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.syspath_prepend("/nowhere/modules")
    mask = os.umask(0o077)
    try:
        with decimal.localcontext(prec=4):
            found = list(tp_runner.map(look_around, [["/nowhere/modules"]] * 4, n_workers=2, engine="ray"))
    finally:
        os.umask(mask)
    assert {tuple(each[1:4]) for each in found} == {(0o600, "JST", "0.3333")}
    assert all(each[0] == [True] for each in found)
    assert len({each[4] for each in found}) == 1
    (of_a_process,) = tp_runner.map(hash, ["text"], n_workers=1)
    assert found[0][4] == of_a_process


def test_errors_name_their_item_and_the_runner_stays_usable(cluster):
    with Ordered(2, engine="ray") as runner:
        got = []
        with pytest.raises(WorkerError, match="ValueError: no") as e:
            got.extend(runner.stream([*range(20), ("raise", "no"), 1]))
        assert got == list(range(1000, 1020))
        assert e.value.index == 20
        assert isinstance(e.value.__cause__, ValueError)
        with pytest.raises(NotPicklableError, match="lock"):
            list(runner.stream([1, ("return-lock",)]))
        assert list(runner.stream([1])) == [1001]


def test_dead_actors_are_noticed_and_started_again(cluster, tmp_path):
    with Ordered(2, engine="ray", max_restarts=4) as runner:
        items = [("die-once", str(tmp_path / str(i))) if i in {3, 40} else i for i in range(80)]
        results = list(runner.stream(items))
    assert results == ["survived" if i in {3, 40} else i + 1000 for i in range(80)]
    with Ordered(2, engine="ray") as runner, pytest.raises(WorkerDiedError) as e:
        list(runner.stream([1, ("die",), 2]))
    assert e.value.index == 1


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_dies_in_each_start_is_not_started_for_ever(tmp_path):
    runner = StartsOnce(1, {"starts": str(tmp_path)}, engine="ray", max_restarts=20)
    with runner, pytest.raises(WorkerDiedError, match=r"before it was ready: .*; no worker is left"):
        list(runner.stream([("die",)]))
    assert len(list(tmp_path.iterdir())) == 4


def test_no_more_is_read_ahead_than_asked(cluster):
    n_read = 0

    def endless():
        nonlocal n_read
        while True:
            n_read += 1
            yield n_read

    with Ordered(2, None, 3, engine="ray") as runner:
        stream = runner.stream(endless())
        for n in range(50):
            next(stream)
            assert n_read - n <= 20
        stream.close()


def test_an_item_that_takes_too_long_is_given_up_and_its_actor_replaced(cluster):
    # The time of the others counts from their being sent: they need it beside other load.
    with Ordered(2, engine="ray", timeout_s=20.0, on_error="return") as runner:
        results = list(runner.stream([1, ("sleep", 900), 2, 3]))
        assert [type(result) for result in results] == [int, ItemTimeoutError, int, int]
        assert results[1].index == 1
        assert list(runner.stream(range(4))) == [1000, 1001, 1002, 1003]


def test_log_records_and_warnings_of_actors_reach_the_caller(cluster, caplog):
    with Ordered(2, engine="ray", log_level="INFO") as runner, caplog.at_level("INFO"):
        assert list(runner.stream([("log", "seen"), ("warn", "beware")])) == [None, None]
    messages = [record for record in caplog.records if hasattr(record, "worker")]
    assert any(record.getMessage() == "seen" and record.device == "cpu" for record in messages)
    assert any("beware" in record.getMessage() for record in messages)


def test_actors_are_placed_by_the_resources_that_they_take(cluster):
    special = cluster.list_all_nodes()[1].node_id
    with Ordered(2, engine="ray", resources={"special": 1, "num_cpus": 0.5}) as runner:
        assert set(runner.stream([("node",)] * 20)) == {special}
    with pytest.raises(ConfigError, match="room for 2 of 3 actors, and none for another one with 1 CPU, 1"):
        Ordered(3, engine="ray", resources={"special": 1})
    with pytest.raises(ConfigError, match="room for 4 of 5 actors"):
        Ordered(5, engine="ray")
    with pytest.raises(
        ConfigError, match=r"room for 0 of 2 actors.*1 GPU"
    ):  # of the cluster, not of this machine
        Ordered(["cuda:0", "cuda:0"], engine="ray")
    with pytest.raises(ConfigError, match="1 GPU"):
        Ordered(1, engine="ray", resources={"num_gpus": 1})


def test_fractions_of_resources_let_actors_share_what_there_is(cluster):
    special = cluster.list_all_nodes()[1].node_id
    with Ordered(4, engine="ray", resources={"special": 0.5, "num_cpus": 0.25}) as runner:
        assert set(runner.stream([("node",)] * 20)) == {special}


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("placement", "n_nodes"), [("strict_spread", 2), ("strict_pack", 1)])
def test_places_are_held_for_all_actors_and_given_back(placement, n_nodes):
    for _ in range(2):  # the places of the first one are free again
        with Ordered(2, engine="ray", placement=placement) as runner:
            places = {worker.where for worker in runner.stats().workers}
            assert len(places) == n_nodes
            assert all(f"on cpu of {place}" in str(runner.stats()) for place in places)
            for node in set(runner.stream([("node",)] * 20)):
                assert any(node[:8] in place for place in places)
    with pytest.raises(ConfigError, match="room for 2 of 3 actors placed by"):
        Ordered(3, engine="ray", placement=placement)
    with pytest.raises(ConfigError, match="leave out min_workers=1"):
        Ordered(3, engine="ray", placement=placement, min_workers=1)


@pytest.mark.usefixtures("cluster")
def test_more_actors_come_while_all_are_busy_and_go_when_they_are_idle(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(_scaling, "GROW_S", 0.1)
    monkeypatch.setattr(_scaling, "IDLE_S", PATIENCE_S)  # none goes before all have come
    with EndsBadly(3, {"path": str(tmp_path)}, engine="ray", min_workers=1) as runner:
        deadline = time.monotonic() + PATIENCE_S

        def there():
            assert time.monotonic() < deadline
            return sum(bool(worker.where) for worker in runner.stats().workers)

        def items():
            while there() < 3:  # one worker that is always busy gets help
                yield ("sleep", 0.05)
            monkeypatch.setattr(_scaling, "GROW_S", PATIENCE_S)
            monkeypatch.setattr(_scaling, "IDLE_S", 0.1)
            # Which goes again when there is next to nothing to do, and in order.
            while there() > 1 or "worker 2 had nothing to do, and its end failed" not in caplog.text:
                time.sleep(0.3)
                yield ("sleep", 0.0)
            yield from range(100)

        assert there() == 1
        *_, last = runner.stream(items())
        assert last == 1099
    assert "OSError: cannot end" in caplog.text
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ConfigError, match="min_workers=4 is more than there are devices, 3"):
        Ordered(3, engine="ray", min_workers=4)


def test_the_loss_of_a_node_is_mended_on_the_other(cluster, caplog):
    node = cluster.add_node(wait=False, num_cpus=1, resources={"short-lived": 1})
    _wait_for_nodes(3)
    with Ordered(5, engine="ray", max_restarts=5) as runner:
        stream = runner.stream(("sleep", 0.01) for _ in range(300))
        for _ in range(50):
            next(stream)
        cluster.remove_node(node)
        _wait_for_nodes(2)  # so that the new actor is known to have no place
        assert sum(1 for _ in stream) == 250
    assert "worker" in caplog.text
    assert "room for 4 of 5 actors" in caplog.text


@pytest.mark.usefixtures("cluster")
def test_a_pipeline_is_the_same_code_on_a_cluster():
    pipeline = Pipeline(n_workers=1, engine="ray", max_restarts=3).flat_map(range).filter(lambda x: x % 2)
    pipeline = pipeline.map(lambda batch: [x * 10 for x in batch], batch=4, n_workers=1)
    with pipeline:
        assert list(pipeline.stream([3, 6])) == [10, 10, 30, 50]
