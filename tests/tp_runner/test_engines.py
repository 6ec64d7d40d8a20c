"""The engines keep the contract, the registry finds them, and a stranger's is welcome."""

from typing import ClassVar

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_core.plugins import Engine, Pool, Verdict, registry
from tp_testing import EngineConformance

from tests.tp_runner.registered import engine_of


class TestFork(EngineConformance):
    engine = type(engine_of("process"))
    options: ClassVar = {"start_method": "fork"}


@pytest.mark.slow
class TestForkServer(EngineConformance):
    engine = type(engine_of("process"))


class TestThread(EngineConformance):
    engine = type(engine_of("thread"))


class TestInline(EngineConformance):
    engine = type(engine_of("inline"))
    patience_s = 0.1
    limits: ClassVar = {"test_several_workers_work_at_the_same_time": "everything is done by the caller"}


def test_the_plugin_brings_the_engines_and_the_command():
    assert {found.item.name for found in registry.engines()} >= {"inline", "process", "thread"}
    (command,) = [found.item for found in registry.commands() if found.item.name == "run"]
    assert command.load().registered_commands


class Backwards(Engine):
    """A stranger's engine, as small as it can be."""

    name = "backwards"

    def assess(self, devices):
        return Verdict.fits(1, "for fun")

    def open(self, worker, devices, *, options):
        assert options == {}
        return BackwardsPool(worker(devices[0]))


class BackwardsPool(Pool):
    def __init__(self, work):
        self._work = work

    def run(self, items, *, ordered=True):
        for item in items:
            yield self._work(item)[::-1]

    def close(self):
        self._work = None


def test_an_engine_that_a_plugin_brings_can_be_asked_for():
    registry.register(Backwards)
    try:
        assert list(tp_runner.map(str.upper, ["ab", "cd"], devices=1, engine="backwards")) == ["BA", "DC"]
        kind = type("Upper", (tp_runner.OrderedRunner,), {})
        with kind(1, engine="backwards") as runner:
            assert list(runner.stream(["ab"])) == ["ba"]
            with pytest.raises(ConfigError, match="'backwards' cannot do 'submit'"):
                runner.submit("ab")
        with pytest.raises(ConfigError, match="engine 'backwards' cannot do 'exit_results'"):
            _ = runner.exit_results
    finally:
        registry.unregister("backwards")
