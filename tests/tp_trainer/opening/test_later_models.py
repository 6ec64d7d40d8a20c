"""Models that a program makes after a session is open are those of one device, no copies of the first."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks
from tp_trainer import Trainer


def step(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def first_weights(call):
    """Return the first weights of three models, with a ``fit`` or a ``prepare`` after each."""
    x = torch.linspace(-1, 1, 16).reshape(16, 1)
    loader = DataLoader(TensorDataset(x, x * x), batch_size=8, shuffle=True)
    weights = []
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        for _ in range(3):
            model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
            weights.append(model[0].weight.tolist())
            if call == "fit":
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                trainer.fit(model, optimizer, loader, step=step, epochs=1)
            else:
                trained = trainer.session.unwrap(trainer.prepare(model))
                weights[-1] = trained[0].weight.tolist()  # as it was sent from the first rank
        noise = torch.rand(2).tolist()
    return weights, noise


@pytest.mark.parametrize("call", ["fit", "prepare"])
def test_later_models_are_the_same_on_any_number_of_ranks(call):
    (alone, _), *_ = run_ranks(first_weights, 1, call)
    several = run_ranks(first_weights, 3, call)
    assert several[0][0] == alone
    assert len({str(weights) for weights in alone}) == 3
    noise = {str(drawn) for _, drawn in several}
    assert len(noise) == 3  # what ranks draw for their own samples differs
