"""Models that a program makes after a session is open are those of one device, no copies of the first."""

import gc
import logging
from functools import partial

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


def prepare_after_an_optimizer_that_only_rank_0_keeps():
    """Return how many optimizers this rank still has when it prepares another model."""
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        model = nn.Linear(1, 1)
        held = [trainer.prepare(model, torch.optim.SGD(model.parameters(), 0.1))]
        if not trainer.is_main:
            held.clear()
            gc.collect()
        living = len(trainer._preparation.optimizers())
        trainer.prepare(nn.Linear(1, 1))
    return living


def test_ranks_need_not_forget_optimizers_together():
    assert run_ranks(prepare_after_an_optimizer_that_only_rank_0_keeps, 2, timeout_s=120) == [1, 0]


def train_with_dropout(*, by_loop, seeds=None):
    """Train three models; return the weights with which they begin, and what the log says of later ones."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tp_trainer").addHandler(handler)
    loader = DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
    weights = []
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        for member in range(3):
            if seeds is not None:
                torch.manual_seed(seeds[member])
            model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
            weights.append(model[0].weight.tolist())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if not by_loop:
                trainer.fit(model, optimizer, loader, step=step)
                continue
            model, optimizer, batches = trainer.prepare(model, optimizer, loader)
            with trainer.loop(batches, epochs=1) as loop:
                for batch in loop:
                    trainer.backward(trainer.run(step, model, batch))
                    optimizer.step()
    logging.getLogger("tp_trainer").removeHandler(handler)
    return weights, [line for line in lines if "begins with other weights than on one device" in line]


@pytest.mark.parametrize("by_loop", [False, True])
def test_models_that_are_made_after_dropout_on_ranks_are_named(two_ranks, by_loop):
    assert train_with_dropout(by_loop=by_loop)[1] == []
    (_, said), (_, said_on_rank_1) = two_ranks.run(partial(train_with_dropout, by_loop=by_loop))
    assert (len(said), said_on_rank_1) == (2, [])  # of the second model, and of the third


def test_models_that_are_seeded_are_the_same_after_dropout_too(two_ranks):
    seeded = partial(train_with_dropout, by_loop=False, seeds=[5, 6, 7])
    assert two_ranks.run(seeded)[0] == seeded()
