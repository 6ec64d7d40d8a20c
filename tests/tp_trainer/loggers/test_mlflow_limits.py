"""What the server of MLflow refuses is never sent to it: too many entries in a call, or too long ones."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from tp_trainer.loggers import MlflowLogger, RunInfo


class LimitedClient:
    """A client for a store with the limits of MLflow's server."""

    def __init__(self, tracking_uri):
        self.params, self.tags, self.metrics = {}, {}, []

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id="2"))

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        assert len(metrics) + len(params) + len(tags) <= 1000
        assert all(len(entry[0]) <= 250 for entry in [*metrics, *params, *tags])
        assert all(len(value) <= 500 for _, value in params)
        for name, value in params:
            assert self.params.setdefault(name, value) == value, "a parameter cannot change"
        for name, value in tags:
            self.set_tag(run_id, name, value)
        self.metrics += metrics

    def set_tag(self, run_id, name, value):
        assert len(value) <= 5000
        self.tags[name] = value

    def set_terminated(self, run_id, status):
        self.status = status


@pytest.fixture
def client(monkeypatch):
    made = LimitedClient(None)
    module = ModuleType("mlflow")
    module.__spec__ = ModuleSpec("mlflow", None)
    module.MlflowClient = lambda tracking_uri: made
    entities = SimpleNamespace(
        Param=lambda *entry: entry, RunTag=lambda *entry: entry, Metric=lambda *entry: entry
    )
    exceptions = SimpleNamespace(MlflowException=RuntimeError)
    for name, each in {"": module, ".entities": entities, ".exceptions": exceptions}.items():
        monkeypatch.setitem(sys.modules, f"mlflow{name}", each)
    return made


def test_many_and_long_entries_are_sent_in_calls_that_the_server_takes(client):
    logger = MlflowLogger()
    params = {f"p{i}": i for i in range(250)} | {"n" * 300: "v" * 600, "a$": 1, "a?": 2}
    environment = {f"E{i}": "x" * 6000 for i in range(150)}
    logger.open(RunInfo(hyperparameters=params, environment=environment, selection="s" * 6000))
    logger.log({f"m{i}": float(i) for i in range(2500)}, step=1, epoch=1)
    logger.event("checkpoint", {"path": "y" * 6000}, step=1, epoch=1)
    logger.close("finished")
    assert client.params.keys() == {*(f"p{i}" for i in range(250)), "n" * 250, "a_"}
    assert client.tags.keys() == {*(f"environment.E{i}" for i in range(150)), "selection", "last_checkpoint"}
    assert len(client.metrics) == 2500
