"""What goes wrong, and what one is told."""

import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment
from tp_core.discovery import PluginRegistry
from tp_core.errors import (
    ConfigError,
    DisagreementError,
    ModelError,
    NonFiniteLossError,
    PluginError,
    RankFailedError,
    SelectionError,
    StateError,
)
from tp_core.plugins import Backend, Verdict, hookimpl
from tp_core.sessions import rendezvous_store
from tp_testing import fake_distribution, rank_outcomes, run_ranks
from tp_trainer import Trainer, Validation
from tp_trainer._opening._agreement import check_same_at_start  # ranks that meet at no other point

from tests.reference_training import squared_error


def make_loader(n=6, batch_size=2):
    x = torch.arange(float(n)).reshape(n, 1)
    return DataLoader(TensorDataset(x, 2 * x), batch_size=batch_size)


def fit(trainer=None, *, model=None, optimizer=None, loader=None, step=squared_error, **kwargs):
    model = nn.Linear(1, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    loader = make_loader() if loader is None else loader
    trainer = Trainer(progress=False) if trainer is None else trainer
    return trainer.fit(model, optimizer, loader, step=step, **kwargs)


def test_a_misspelled_variable_gets_a_suggestion_at_once(monkeypatch):
    monkeypatch.setenv("TP_BACKEND", "singel")
    with pytest.raises(SelectionError, match=r"'singel' [(]asked for by TP_BACKEND[)].*\n.*'single'"):
        Trainer()
    Trainer(backend="single")


def test_the_variable_chooses_too(monkeypatch):
    monkeypatch.setenv("TP_BACKEND", "ddp")
    with pytest.raises(SelectionError, match=r"'ddp' \(asked for by TP_BACKEND\) does not fit"):
        fit()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_saves_nothing(tmp_path, value):
    model, steps = nn.Linear(1, 1), []

    def step(model, batch):
        steps.append(1)
        loss = squared_error(model, batch)
        return loss * value if len(steps) == 5 else loss

    with pytest.raises(NonFiniteLossError, match=r"at training step 5 \(rank 0\)"):
        fit(model=model, step=step, epochs=3, checkpoint=tmp_path)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000003"]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_validation_loss_that_is_not_finite_says_so():
    def nan_step(model, batch):
        return squared_error(model, batch) * float("nan")

    with pytest.raises(NonFiniteLossError, match="at validation step 1"):
        fit(validation=Validation(make_loader(), step=nan_step))


@pytest.mark.parametrize("empty", [[], DataLoader([], batch_size=4), {"a": [1], "b": []}])
def test_a_validation_of_nothing_is_refused_before_the_first_step(empty):
    steps = []
    with pytest.raises(ConfigError, match="nothing to validate on: validation has no batch"):
        fit(step=lambda model, batch: steps.append(1), validation=empty)
    assert not steps


@pytest.mark.parametrize("lazy", [nn.LazyLinear(1), nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d())])
def test_a_model_without_shapes_is_refused(lazy):
    with pytest.raises(ModelError, match="has no shape yet: it is of a lazy module"):
        fit(model=lazy)
    with Trainer(devices="cpu") as trainer, pytest.raises(ModelError, match="call the model on one before"):
        trainer.prepare(lazy)


def test_something_that_is_no_model_is_refused():
    with Trainer() as trainer, pytest.raises(ModelError, match=r"must be a torch.nn.Module"):
        trainer.session.prepare_model("model")


def test_prepare_refuses_an_optimizer_of_another_model():
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        Trainer().prepare(nn.Linear(1, 1), other)


BROKEN = """
    raise ImportError("its library is missing")
"""


def test_asking_for_a_broken_plugin_gives_its_cause(tmp_path):
    with fake_distribution(
        tmp_path, "tp-odd", entry_points={"odd": "odd_plugin"}, modules={"odd_plugin": BROKEN}
    ):
        with pytest.raises(PluginError, match="its library is missing") as caught:
            Trainer(backend="odd", plugins=PluginRegistry())
        assert isinstance(caught.value.__cause__, ImportError)


def test_an_unknown_name_mentions_the_broken_plugins_too(tmp_path):
    with fake_distribution(
        tmp_path, "tp-odd", entry_points={"odd": "odd_plugin"}, modules={"odd_plugin": BROKEN}
    ):
        with pytest.raises(SelectionError) as caught:
            Trainer(backend="no-such", plugins=PluginRegistry())
        assert any("odd (tp-odd 1.0) is broken" in note for note in caught.value.__notes__)


class Raising(Backend):
    name = "raising"

    def assess(self, job):
        raise RuntimeError("cannot even look")

    def open(self, job):
        raise AssertionError("never opened")


class Confused(Backend):
    name = "confused"

    def assess(self, job):
        return Verdict.fits(99, "sure")

    def open(self, job):
        return "no session"


class Failing(Confused):
    name = "failing"

    def open(self, job):
        raise OSError("no room")


def plugins_with(*backends):
    plugins = PluginRegistry()
    plugin = type(
        "Plugin", (), {"tp_backends": staticmethod(hookimpl(specname="tp_backends")(lambda: backends))}
    )
    plugins.register(plugin, name="tests")
    return plugins


def test_a_plugin_that_raises_in_assess_does_not_stop_the_others():
    trainer = Trainer(progress=False, plugins=plugins_with(Raising()))
    fit(trainer)
    assert trainer.selection.chosen.name == "single"
    assert "RuntimeError: cannot even look" in str(trainer.selection)


def test_a_backend_that_opens_no_session_is_named():
    with pytest.raises(PluginError, match="'confused' of tests must open a Session, got str"):
        fit(Trainer(plugins=plugins_with(Confused())))


def test_a_backend_that_fails_to_open_is_named():
    with pytest.raises(OSError, match="no room") as caught:
        fit(Trainer(backend="failing", plugins=plugins_with(Failing())))
    assert caught.value.__notes__ == ["while opening backend 'failing' of tests"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("weight"), "it lacks weight"),
        (lambda s: s.update(extra=torch.ones(1)), "it has extra, which the model lacks"),
        (lambda s: s.update(weight=torch.ones(3, 3)), r"it has weight of shape \(3, 3\), not \(1, 1\)"),
    ],
)
def test_a_file_of_another_model_leaves_the_model_as_it_was(tmp_path, change, words):
    model, path = nn.Linear(1, 1), tmp_path / "model.pt"
    before = model.weight.item()
    state = {name: t + 1 for name, t in model.state_dict().items()}
    change(state)
    torch.save(state, path)
    with pytest.raises(StateError, match=words):
        Trainer().load_model(model, path)
    assert model.weight.item() == before


def different_options():
    rank = LaunchEnvironment.read().rank
    trainer = Trainer(options={"ddp": {"static_graph": bool(rank)}}, progress=False)
    with pytest.raises(DisagreementError) as caught:
        fit(trainer)
    return str(caught.value)


def test_ranks_with_different_options_are_told_on_every_rank():
    for message in run_ranks(different_options, 2):
        assert "ranks disagree on the options" in message


def different_backends():
    rank = LaunchEnvironment.read().rank

    class Other(Confused):
        name = "other"

    trainer = Trainer(backend="other" if rank else "ddp", plugins=plugins_with(Other()))
    with pytest.raises(DisagreementError) as caught:
        fit(trainer)
    return str(caught.value)


def test_ranks_with_different_backends_are_told_before_one_of_them_hangs():
    for message in run_ranks(different_backends, 2):
        assert "ranks disagree on the backend" in message
        assert "ddp' of tp-trainer" in message


def different_lengths():
    rank = LaunchEnvironment.read().rank
    with pytest.raises(DisagreementError) as caught:
        fit(loader=make_loader(n=6 + 4 * rank))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_with_different_amounts_of_data_are_told():
    for message in run_ranks(different_lengths, 2):
        assert "ranks disagree on the number of batches of a loader: rank 0 has 3" in message


def different_arguments(**arguments):
    rank = LaunchEnvironment.read().rank
    with pytest.raises(DisagreementError) as caught:
        fit(**{name: values[rank] for name, values in arguments.items()})
    return str(caught.value)


def different_arguments_of_fit(folder):
    several = [{"epochs": (1, 2)}, {"clip_norm": (None, 1.0)}, {"checkpoint": (None, folder)}]
    return [different_arguments(**arguments) for arguments in several]


@pytest.mark.slow
def test_ranks_that_mean_to_train_differently_are_told(tmp_path):
    for epochs, clip, checkpoint in run_ranks(different_arguments_of_fit, 2, tmp_path):
        assert "ranks disagree on the epochs: rank 0 has 1, rank 1 has 2" in epochs
        assert "ranks disagree on the clip_norm: rank 0 has None, rank 1 has 1.0" in clip
        assert "ranks disagree on the checkpoint: rank 0 has None, rank 1 has Checkpoints(" in checkpoint


def killed_in_training():
    calls = []

    def step(model, batch):
        calls.append(1)
        if LaunchEnvironment.read().rank == 1 and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return squared_error(model, batch)

    fit(step=step, epochs=1000)


def test_the_others_do_not_hang_when_a_rank_is_killed():
    first, second = rank_outcomes(killed_in_training, 2)
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None


def raising_in_training():
    def step(model, batch):
        if LaunchEnvironment.read().rank == 1:
            raise ValueError("rank 1's own words")
        return squared_error(model, batch)

    fit(step=step, epochs=1000)


@pytest.mark.slow
def test_the_others_do_not_hang_when_a_rank_raises():
    with pytest.raises(RankFailedError):
        run_ranks(raising_in_training, 2)
    first, second = rank_outcomes(raising_in_training, 2)
    assert "rank 1's own words" in second.error
    assert first.error is not None


def absent(noticed):
    environment = LaunchEnvironment.read()
    if environment.rank == 1:
        while not noticed.exists():
            time.sleep(0.05)
        return "late"
    with pytest.raises(RankFailedError) as caught:
        check_same_at_start(environment, {}, seed=0, timeout_s=2.0)
    noticed.touch()
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path):
    first, _ = run_ranks(absent, 2, tmp_path / "noticed")
    assert "rank 1 did not come" in first or "could not reach the rendezvous" in first


def fails_once_on_rank_0():
    environment = LaunchEnvironment.read()
    seeds = [check_same_at_start(environment, {}, seed=environment.rank)]
    if environment.rank == 0:
        with pytest.raises(RankFailedError, match="rank 1 did not come"):
            check_same_at_start(environment, {}, seed=7, timeout_s=0.2)
        rendezvous_store(environment).set("has failed", "")
    else:
        rendezvous_store(environment).wait(["has failed"])
    return [*seeds, check_same_at_start(environment, {}, seed=environment.rank + 2)]


@pytest.mark.slow
def test_ranks_meet_again_after_an_attempt_that_one_made_alone():
    assert run_ranks(fails_once_on_rank_0, 2) == [[0, 2], [0, 2]]
