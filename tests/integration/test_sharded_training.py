"""The trainer picks the backend of a model with split parameters, and saves and resumes through it."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks

from tests.models import perceptron
from tests.reference_training import squared_error


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(42, 6, generator=generator).double()
    return DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True)


make_model = functools.partial(perceptron, 6, 9, 6)


def train(folder, group_size, split=True):
    import tp_shard as ts
    from tp_trainer import Trainer

    if split:
        ts.distributed.init_process_group(group_size)
        convert = ts.nn.ParallelLinear.convert_parallel_linear
    with Trainer(seed=4, progress=False) as trainer:

        def build():
            model = make_model()
            if split:
                model[0], model[2] = convert(model[0], 1), convert(model[2], 0)
            return model, torch.optim.Adam(model.parameters(), lr=0.02)

        model, optimizer = build()
        trainer.fit(model, optimizer, data(), step=squared_error, epochs=3, validation=data(), clip_norm=0.5)
        file = Path(folder, "model.pt")
        trainer.save_model(model, file)
        weights = Path(folder, "model.safetensors")
        trainer.export(model, weights)
        assert all(torch.equal(tensor, torch.load(file)[name]) for name, tensor in load_file(weights).items())
        fresh, _ = build()
        trainer.load_model(fresh, file)
        assert trainer.evaluate(fresh, data(), step=squared_error) == trainer.evaluate(
            model, data(), step=squared_error
        )
        return str(trainer.selection.chosen.name), torch.load(file)


@pytest.mark.parametrize(("processes", "group_size"), [(2, -1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_split_model_is_trained_saved_and_loaded_like_a_whole_one(tmp_path, processes, group_size):
    name, expected = train(str(tmp_path), None, split=False)
    assert name == "single"
    ranks = run_ranks(functools.partial(train, str(tmp_path), group_size), processes)
    for chosen, state in ranks:
        assert chosen == "shard"
        assert list(state) == list(expected)
        for key, tensor in expected.items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-7, atol=1e-9)


class Dropping(nn.Module):
    """A block that drops split features, which two ranks do not divide, and its whole output."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = nn.functional.dropout(self.up(x), 0.3, self.training)
        return self.out(nn.functional.dropout(self.down(hidden), 0.3, self.training))


def train_with_dropout(folder, group_size, *, until=None):
    """Train in a folder, from its last checkpoint if there is one; return the whole state and this rank's."""
    import tp_shard as ts
    from tp_trainer import Checkpoints, Trainer

    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group(group_size)
    torch.manual_seed(1)
    model = ts.parallelize(Dropping().double(), {"up": ts.Column(), "down": ts.Row()})
    with Trainer(seed=4, progress=False) as trainer:
        trainer.fit(
            model,
            torch.optim.Adam(model.parameters(), lr=0.02),
            data(),
            step=squared_error,
            epochs=2,
            max_steps=until,
            checkpoint=Checkpoints(folder, every_steps=3, every_epochs=None),
            resume="auto",
        )
        whole = [model.out.weight.detach().clone(), model.down.bias.detach().clone()]
        return [model.up.weight.detach().clone(), *whole], whole


def interrupted_and_not(folder, group_size):
    expected, whole = train_with_dropout(Path(folder, "through"), group_size)
    train_with_dropout(Path(folder, "parts"), group_size, until=5)
    found, _ = train_with_dropout(Path(folder, "parts"), group_size)
    return all(map(torch.equal, found, expected)), whole


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "group_size"), [(2, -1), (4, 2)])
def test_dropout_of_split_features_leaves_ranks_alike_and_is_resumed_bit_for_bit(
    tmp_path, processes, group_size
):
    ranks = run_ranks(functools.partial(interrupted_and_not, str(tmp_path), group_size), processes)
    for same, whole in ranks:
        assert same
        assert all(map(torch.equal, whole, ranks[0][1]))
