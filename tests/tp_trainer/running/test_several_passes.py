"""Steps of one's own with several losses through one graph, or with a closure: as by hand, and resumed."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.cases import first_fast
from tests.reference_training import train

IN_ONE_PROCESS = [
    ("cpu", "auto"),
    (["cpu", "cpu"], "tuple"),
    pytest.param(["cpu", "cpu"], "dp-gather", marks=pytest.mark.slow),
]


def loader(n=24):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(n, 2, generator=generator), torch.randn(n, 2, generator=generator))
    return DataLoader(data, batch_size=8, shuffle=True)


def numbers_of(model):
    whole = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return torch.cat([p.flatten() for p in whole]).tolist()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(2, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def both(self, state):
        hidden = torch.tanh(self.trunk(state))
        return self.actor(hidden), self.critic(hidden)

    def loss(self, batch):
        return self.both(batch[0])[1].square().mean()


def losses(model, batch):
    state, action = batch
    chosen, value = model.both(state)
    policy = (chosen - action).square().mean()
    return {"loss": policy, "value": (value - action.sum(1, keepdim=True)).square().mean()}


def actor_critic(*, together, devices="cpu", backend="auto", folder=None, max_steps=None):
    """Train both in one module, with one backward pass or two."""
    torch.manual_seed(2)
    model = ActorCritic()
    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        model, batches = trainer.prepare(model, loader())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with trainer.loop(
            batches,
            epochs=2,
            max_steps=max_steps,
            state={"model": model, "optimizer": optimizer},
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        ) as loop:
            for batch in loop:
                optimizer.zero_grad()
                found = trainer.run(losses, model, batch)
                if together:
                    trainer.backward(found["loss"] + found["value"])
                else:
                    trainer.backward(found["loss"], retain_graph=True)
                    trainer.backward(found["value"])
                optimizer.step()
        return numbers_of(model)


def actor_critic_by_hand():
    torch.manual_seed(2)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        batches = trainer.prepare(loader())
        for _ in range(2):
            train(model, optimizer, batches, lambda model, batch: sum(losses(model, batch).values()))
    return numbers_of(model)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("devices", "backend"), IN_ONE_PROCESS)
def test_an_actor_and_a_critic_in_one_module_are_as_by_hand_and_resumed(tmp_path, together, devices, backend):
    arguments = {"together": together, "devices": devices, "backend": backend}
    whole = actor_critic(**arguments)
    assert whole == pytest.approx(actor_critic_by_hand(), rel=1e-4, abs=1e-6)
    actor_critic(**arguments, folder=tmp_path, max_steps=4)
    assert actor_critic(**arguments, folder=tmp_path) == whole


def test_a_loss_that_the_model_makes_on_parts_is_pointed_out():
    with Trainer(seed=0, devices=["cpu", "cpu"], backend="dp-gather", progress=False) as trainer:
        model, batches = trainer.prepare(ActorCritic(), loader())
        found = trainer.run(lambda model, batch: {"value": model.loss(batch)}, model, next(iter(batches)))
        with pytest.raises(StepError, match=r"got shape \(2,\); .* make it in the step instead"):
            trainer.backward(found["value"])


def _actor_critic_on_a_rank(backend, folder):
    whole = actor_critic(together=True, backend=backend)
    actor_critic(together=True, backend=backend, folder=folder, max_steps=4)
    parts = actor_critic(together=True, backend=backend, folder=folder)
    if backend == "ddp":
        with pytest.raises(StepError, match=r"add the losses .* trainer\.backward\(first \+ second\)"):
            actor_critic(together=False, backend=backend)
    return whole, parts


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_an_actor_and_a_critic_go_back_once_on_several_ranks(tmp_path, backend):
    expected = actor_critic_by_hand()
    for whole, parts in run_ranks(functools.partial(_actor_critic_on_a_rank, backend, tmp_path), 2):
        assert whole == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert parts == whole


def lbfgs(*, devices="cpu", backend="auto", folder=None, max_steps=None):
    torch.manual_seed(2)
    losses = []  # by which the line search decides
    with Trainer(seed=0, devices=devices, backend=backend, progress=False) as trainer:
        model, batches = trainer.prepare(nn.Linear(2, 2), loader(23))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        with trainer.loop(
            batches,
            epochs=2,
            max_steps=max_steps,
            state={"model": model, "optimizer": optimizer},
            checkpoint=folder and Checkpoints(folder, every_steps=2),
            resume=folder and "auto",
        ) as loop:
            for batch in loop:

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = trainer.run(lambda m, b: F.mse_loss(m(b[0]), b[1]), model, batch)
                    trainer.backward(loss)
                    losses.append(trainer.global_loss(loss).item())
                    return losses[-1]

                optimizer.step(closure)
        return numbers_of(model), losses


@pytest.mark.parametrize("max_steps", first_fast([1, 3, 4], 2))
@pytest.mark.parametrize(("devices", "backend"), IN_ONE_PROCESS)
def test_lbfgs_is_resumed_bit_for_bit(tmp_path, max_steps, devices, backend):
    arguments = {"devices": devices, "backend": backend}
    whole, _ = lbfgs(**arguments)
    lbfgs(**arguments, folder=tmp_path, max_steps=max_steps)
    assert lbfgs(**arguments, folder=tmp_path)[0] == whole


def _lbfgs_on_a_rank(folder):
    whole = lbfgs(backend="ddp")
    lbfgs(backend="ddp", folder=folder, max_steps=4)
    return whole, lbfgs(backend="ddp", folder=folder)[0]


@pytest.mark.slow
def test_lbfgs_searches_along_the_loss_of_the_global_batch_on_two_ranks(tmp_path):
    weights, losses = lbfgs()
    for whole, parts in run_ranks(functools.partial(_lbfgs_on_a_rank, tmp_path), 2):
        assert whole[1] == pytest.approx(losses, rel=1e-4)  # in as many passes, over shares of 4 and 3, too
        assert whole[0] == pytest.approx(weights, rel=1e-4, abs=1e-6)
        assert parts == whole[0]
