"""Somebody else's backend over ``fully_shard`` saves, resumes and exports with no code of its own for it."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from tp_core.discovery import PluginRegistry
from tp_testing import run_ranks
from tp_trainer import Checkpoints, GradientRules, Trainer

from tests.reference_training import rows_and_sums, squared_error


def load_example():
    """Return the module of the guide for authors of plugins."""
    path = Path(__file__).parents[2] / "docs" / "examples" / "fsdp2_backend.py"
    spec = importlib.util.spec_from_file_location("fsdp2_backend", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FullyShardBackend = load_example().FullyShardBackend


def make_trainer(**kwargs):
    plugins = PluginRegistry()
    plugins.register(FullyShardBackend())
    return Trainer(plugins=plugins, seed=1, progress=False, devices="cpu", **kwargs)


class Net(nn.Module):
    """Has parameters that two or three ranks cannot share evenly, a frozen one and a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5)
        self.register_buffer("shift", torch.randn(5))
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight.requires_grad_(requires_grad=False)
        self.last = nn.Linear(5, 1)
        self.scale = nn.Linear(1, 1)
        self.double()

    def forward(self, x):
        return self.scale(self.last(self.second((self.first(x) + self.shift).tanh())))


def make_loader():
    return DataLoader(rows_and_sums(24, seed=3, curved=True), batch_size=12, shuffle=True)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def fit(folder=None, *, epochs=3, turned=False, asynchronous=False):
    """Return the whole model's state after training; ``turned`` gives the parameters the other way round."""
    model = Net()
    optimizer = torch.optim.Adam(trained(model)[:: -1 if turned else 1], lr=0.02)
    arguments = {}
    if folder is not None:
        settings = Checkpoints(folder, every_steps=1, every_epochs=None, keep=99, background=asynchronous)
        arguments = {"checkpoint": settings, "resume": "auto"}
    with make_trainer() as trainer:
        trainer.fit(model, optimizer, make_loader(), step=squared_error, epochs=epochs, **arguments)
        kinds = {type(t).__name__ for s in optimizer.state.values() for k, t in s.items() if k != "step"}
        state = trainer.session.model_state(model)
        return trainer.selection.chosen.name, kinds, {n: t.detach().clone() for n, t in state.items()}


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(t, other[n]) for n, t in one.items())


def resumed(folder, **kwargs):
    name, kinds, expected = fit(**{k: v for k, v in kwargs.items() if k not in {"turned", "asynchronous"}})
    fit(folder, epochs=1, asynchronous=kwargs.get("asynchronous", False))
    _, kinds_after, found = fit(folder, **kwargs)
    return name, kinds | kinds_after, equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_resumed_run_is_the_uninterrupted_one_and_its_state_stays_dtensors(tmp_path, processes):
    for name, kinds, is_same in run_ranks(resumed, processes, tmp_path):
        assert (name, kinds) == ("fsdp2", {"DTensor"})
        assert is_same


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"turned": True}, {"asynchronous": True}], ids=["turned", "in threads"])
def test_also_with_parameters_in_another_order_and_written_by_threads(tmp_path, how):
    for _, kinds, is_same in run_ranks(functools.partial(resumed, **how), 2, tmp_path):
        assert kinds == {"DTensor"}
        assert is_same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.nightly),
        (2, 3),
        pytest.param(3, 2, marks=pytest.mark.nightly),
    ],
)
def test_another_number_of_ranks_goes_on_from_a_checkpoint(tmp_path, before, after):
    def start(processes, epochs):
        run = functools.partial(fit, tmp_path, epochs=epochs)
        return [run()] if processes == 1 else run_ranks(run, processes)

    start(before, 1)
    _, _, expected = fit(epochs=3)
    for name, _, found in start(after, 3):
        assert name == ("single" if after == 1 else "fsdp2")
        assert list(found) == list(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11)


def files(folder):
    with make_trainer() as trainer:
        model, other = trainer.prepare(Net(seed=1), Net(seed=2))
        before = trainer.evaluate(model, make_loader(), step=squared_error)
        trainer.save_model(model, folder / "model.pt")
        trainer.export(model, folder / "model.safetensors")
        trainer.load_model(other, folder / "model.pt")
        trainer.session.barrier()
        kind = type(other.last.weight.data).__name__
        return before, trainer.evaluate(other, make_loader(), step=squared_error), kind


@pytest.mark.slow
def test_files_are_whole_and_load_on_any_backend(tmp_path):
    plain = Net(seed=1)
    with make_trainer() as trainer:
        expected = trainer.evaluate(plain, make_loader(), step=squared_error)
    for before, after, kind in run_ranks(files, 2, tmp_path):
        assert before == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(expected, rel=1e-12)
        assert kind == "DTensor"
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    for found in (state, load_file(tmp_path / "model.safetensors")):
        assert all(type(tensor) is torch.Tensor for tensor in found.values())
        assert equal(dict(plain.state_dict()), {name: found[name] for name in plain.state_dict()})


def load_checkpoint(folder):
    with make_trainer() as trainer:
        model = Net(seed=7)
        trainer.load_model(model, folder)
        return trainer.session.model_state(model)


@pytest.mark.slow
def test_the_model_of_a_checkpoint_is_loaded_by_itself(tmp_path):
    (_, _, expected), _ = run_ranks(functools.partial(fit, tmp_path, epochs=1), 2)
    newest = max(tmp_path.glob("step-*"))
    for found in (load_checkpoint(newest), *run_ranks(load_checkpoint, 2, newest)):
        assert equal(found, expected)


def fit_evaluate_and_fit(folder):
    model = Net()
    optimizer = torch.optim.Adam(trained(model), lr=0.02)
    with make_trainer() as trainer:
        for epochs in (1, 2):
            # An evaluation leaves fully_shard's parameters gathered, under other objects.
            arguments = {
                "epochs": epochs,
                "checkpoint": folder,
                "resume": "auto",
                "validation": make_loader(),
            }
            trainer.fit(model, optimizer, make_loader(), step=squared_error, **arguments)
            trainer.evaluate(model, make_loader(), step=squared_error)
        state = trainer.session.model_state(model)
    return equal(state, fit(epochs=2)[2])


@pytest.mark.slow
def test_an_evaluation_between_two_runs_changes_nothing(tmp_path):
    assert run_ranks(fit_evaluate_and_fit, 2, tmp_path) == [True, True]


WAYS = {
    "clip_norm": ({}, {"clip_norm": 0.05}),
    "clip_value": ({}, {"gradients": GradientRules(clip_value=0.01)}),
    "skip": ({}, {"gradients": GradientRules(nonfinite="skip")}),
    "accumulate": ({"accumulate": 2}, {}),
}


def in_all_ways():
    losses = {}
    for name, (trainer_arguments, arguments) in WAYS.items():
        model = Net()
        optimizer = torch.optim.Adam(trained(model), lr=0.02)
        with make_trainer(**trainer_arguments) as trainer:
            history = trainer.fit(model, optimizer, make_loader(), step=squared_error, epochs=2, **arguments)
        losses[name] = [record.train["loss"] for record in history]
    return losses


@pytest.mark.slow
def test_parts_that_are_empty_on_a_rank_are_clipped_and_looked_at():
    expected = in_all_ways()
    for losses in run_ranks(in_all_ways, 2):
        for name, found in losses.items():
            assert found == pytest.approx(expected[name], rel=1e-10), name
