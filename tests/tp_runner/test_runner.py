"""The runner classes: six static methods, devices, cfg, reuse."""

import argparse
import dataclasses
import os
import types
from pathlib import Path

import pytest
import torch
from tp_runner import CfgNode, OrderedRunner, RunnerClosedError, UnorderedRunner

ENGINES = [
    {"engine": "process", "start_method": "fork"},
    # Each worker imports this module anew, and with it torch and pytest.
    pytest.param({"engine": "process", "start_method": "forkserver"}, marks=pytest.mark.slow),
    pytest.param({"engine": "process", "start_method": "spawn"}, marks=pytest.mark.nightly),
    {"engine": "thread"},
    {"engine": "inline"},
]
IDS = ["fork", "forkserver", "spawn", "thread", "inline"]


class SumOfPowers(UnorderedRunner):
    @staticmethod
    def producer_work(device, cfg, data):
        return data**cfg.exponent

    @staticmethod
    def consumer_init(cfg):
        cfg.sum = 0

    @staticmethod
    def consumer_work(cfg, data):
        cfg.sum += data

    @staticmethod
    def consumer_end(cfg):
        return cfg.sum


class Collected(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.offset = 100
        cfg.pid = os.getpid()

    @staticmethod
    def producer_work(device, cfg, data):
        return device, data + cfg.offset, cfg.pid

    @staticmethod
    def consumer_init(cfg):
        cfg.results = []

    @staticmethod
    def consumer_work(cfg, data):
        cfg.results.append(data)

    @staticmethod
    def consumer_end(cfg):
        return cfg.results


class Ending(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        cfg.lines = [f"init {device}"]

    @staticmethod
    def producer_work(device, cfg, data):
        cfg.lines.append(f"work {data}")

    @staticmethod
    def producer_end(device, cfg):
        with Path(cfg.path).open("a") as file:
            file.write("\n".join([*cfg.lines, "end"]))


class Doubler(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, data):
        return data * 2


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_an_unordered_runner_reduces_through_its_consumer(options):
    with SumOfPowers(devices=3, cfg={"exponent": 3}, **options) as runner:
        assert runner(range(100)) == sum(i**3 for i in range(100))
        assert runner(i for i in range(10)) == sum(i**3 for i in range(10))


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_an_ordered_runner_keeps_the_order_and_each_worker_its_state(options):
    with Collected(devices=["cpu", "cpu"], **options) as runner:
        results = runner(range(500))
    assert [value for _, value, _ in results] == list(range(100, 600))
    assert {device for device, _, _ in results} == {"cpu"}
    if options["engine"] == "process":
        assert os.getpid() not in {pid for _, _, pid in results}


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_start_and_end_run_once_in_each_worker(options, tmp_path):
    path = tmp_path / "lines"
    runner = Ending(devices=1, cfg={"path": str(path)}, **options)
    runner([1, 2])
    runner([3])
    assert not path.exists()
    runner.close()
    assert path.read_text().split("\n") == ["init cpu", "work 1", "work 2", "work 3", "end"]


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_closed_runner_says_so_and_can_be_started_again(options):
    runner = Doubler(2, **options)
    assert list(runner.stream([1, 2])) == [2, 4]
    runner.close()
    runner.close()
    with pytest.raises(RunnerClosedError, match=r"activate\(\) starts it again"):
        runner.stream([1])
    runner.activate()
    runner.activate()
    assert list(runner.stream([1, 2])) == [2, 4]
    runner.stop()


@pytest.mark.parametrize("items", [[], (), range(0), iter(()), {}], ids=lambda x: type(x).__name__)
def test_no_items_give_no_results(items):
    with Doubler(2, engine="thread") as runner:
        assert list(runner.stream(items)) == []


@pytest.mark.parametrize("n_items", [2, 5000])
def test_any_number_of_items_works(n_items):
    with Doubler(3, start_method="fork") as runner:
        assert list(runner.stream(range(n_items))) == [2 * i for i in range(n_items)]


@dataclasses.dataclass
class Plain:
    exponent: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    exponent: int = 2


@pytest.mark.parametrize(
    "cfg",
    [
        {"exponent": 2},
        CfgNode(exponent=2),
        types.MappingProxyType({"exponent": 2}),
        types.SimpleNamespace(exponent=2),
        argparse.Namespace(exponent=2),
        Plain(),
        Frozen(),
    ],
    ids=lambda cfg: type(cfg).__name__,
)
def test_any_kind_of_cfg_is_copied_and_takes_new_names(cfg):
    with SumOfPowers(2, cfg, engine="thread") as runner:
        assert runner([1, 2, 3]) == 14
        assert runner([1, 2, 3]) == 14
    assert not hasattr(cfg, "sum")


def test_a_cfg_node_is_a_dictionary_with_attributes():
    node = CfgNode({"a": {"b": 1}}, c=2)
    assert node.a.b == 1
    assert node["c"] == node.c == 2
    node.d = 3
    del node.c
    assert node == {"a": {"b": 1}, "d": 3}
    with pytest.raises(AttributeError, match="no 'missing' in this configuration; there are: a, d"):
        _ = node.missing
    with pytest.raises(AttributeError, match="no 'missing'"):
        del node.missing


def test_devices_may_be_torch_devices():
    with Collected([torch.device("cpu"), "cpu"], start_method="fork") as runner:
        assert [device for device, _, _ in runner([1])] == ["cpu"]


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(m, marks=pytest.mark.slow) for m in ("spawn", "forkserver"))]
)
def test_workers_compute_with_as_many_threads_as_asked(method):
    class Threads(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

    with Threads(2, threads=3, start_method=method) as runner:
        assert list(runner.stream([0])) == [("3", 3)]


def test_classes_of_a_main_module_work_under_every_start_method(run_script):
    out = run_script("""
        import sys
        from tp_runner import OrderedRunner

        class Item:
            def __init__(self, value):
                self.value = value

        class Runner(OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                assert type(item) is Item
                return Item(item.value + 1)

        for method in ("fork", "spawn", "forkserver"):
            with Runner(devices=2, start_method=method) as runner:
                results = list(runner.stream([Item(1), Item(2)]))
                assert all(type(r) is Item for r in results), method
                print(method, [r.value for r in results])
        """)
    assert out.splitlines() == ["fork [2, 3]", "spawn [2, 3]", "forkserver [2, 3]"]


def test_a_forgotten_runner_ends_with_its_program(run_script, is_running):
    out = run_script("""
        import os
        import tp_runner

        class Pids(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                return os.getpid()

        runner = Pids(devices=2)
        print(*set(runner.stream(range(100))))
        """)
    assert not any(is_running(pid) for pid in out.split())
