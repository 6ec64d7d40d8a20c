"""`backend="fastest"` times a few steps of the best backends, and the run is as if it had not."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_testing import run_ranks
from tp_trainer import Trainer, _memory

SAMPLES = TensorDataset(torch.arange(48.0).reshape(12, 4) / 48, torch.arange(12) % 3)


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(backend, devices="cpu"):
    """Train from one seed, and return everything that a run leaves, with the choice of the backend."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True)
    with Trainer(backend=backend, devices=devices, seed=7, progress=False) as trainer:
        trainer.fit(model, optimizer, loader, step=step, epochs=2)
        state = {n: t.clone() for n, t in model.state_dict().items()}
        moments = [t for values in optimizer.state.values() for t in values.values()]
        found = [*state.values(), *moments, torch.get_rng_state(), torch.tensor(random.random())]
        return found, trainer.selection.chosen.name, trainer.selection.asked_by


def compare_runs():
    found, name, why = trained("fastest")
    expected, _, _ = trained(name)
    return all(map(torch.equal, found, expected)), name, why


def test_the_run_is_that_of_the_backend_that_is_kept():
    found, name, why = trained("fastest", ["cpu", "cpu"])
    expected, _, _ = trained(name, ["cpu", "cpu"])
    assert all(map(torch.equal, found, expected))
    assert why.startswith("fastest, by the time of a step: ")
    assert {"tuple", "dp-gather"} <= {word for word in why.replace(",", "").split() if word[0].isalpha()}


@pytest.mark.slow
def test_all_ranks_keep_the_same_one():
    (same, name, why), other = run_ranks(compare_runs, 2, timeout_s=100)
    assert same
    assert other[:2] == (same, name)
    assert "ddp" in why
    assert "fsdp" in why


def test_the_only_one_that_fits_is_taken_untimed():
    _, name, why = trained("fastest")
    assert (name, why) == ("single", "fastest: only 'single' fits")


def test_memory_is_estimated_once(monkeypatch):
    estimates = []
    estimate = _memory.add_memory  # private: nothing public tells how often it is called

    def counted(job, work):
        estimates.append(work)
        return estimate(job, work)

    monkeypatch.setattr(_memory, "add_memory", counted)
    options = {"backend": "fastest", "devices": ["cpu", "cpu"], "progress": False}
    with Trainer(**options, activation_checkpointing="auto") as trainer:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        loader = DataLoader(SAMPLES, batch_size=4)
        trainer.fit(model, torch.optim.AdamW(model.parameters()), loader, step=step)
        assert trainer.selection.asked_by.startswith("fastest, by the time of a step: ")
    assert len(estimates) == 1


def test_what_cannot_be_timed_is_refused():
    with pytest.raises(ConfigError, match="call fit\\(\\), or name one"):
        Trainer(backend="fastest", devices="cpu").prepare(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="needs a DataLoader with a batch size over a dataset"):
        Trainer(backend="fastest", devices=["cpu", "cpu"], progress=False).fit(
            model, torch.optim.SGD(model.parameters()), [torch.ones(2, 2)], step=step, epochs=1
        )
