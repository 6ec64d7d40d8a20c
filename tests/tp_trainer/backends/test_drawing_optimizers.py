"""An optimizer that draws random numbers draws the same on all ranks, and dropout stays each rank's own."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_trainer import Callback, FsdpOptions, Trainer

from tests.models import perceptron
from tests.reference_training import squared_error


class Noisy(torch.optim.SGD):
    """Adds noise to each step, as stochastic rounding does; in a class below from a later step on."""

    first = 1

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(())) + 1
                local = p.to_local() if hasattr(p, "to_local") else p
                if state["step"] >= self.first:
                    local.add_(torch.randn_like(local), alpha=0.01)
        return super().step(closure)


class NoisyLater(Noisy):
    first = 2  # as after a burn-in


def fit(backend, epochs=2, folder=None, kind=Noisy):
    """Return the weights, those that are this rank's own as well, and what the rank draws afterwards."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    options = FsdpOptions(replicas=2) if backend == "fsdp" else None
    with Trainer(backend=backend, devices="cpu", options=options, seed=2, progress=False) as trainer:
        optimizer = kind(model.parameters(), lr=0.1)
        arguments = {} if folder is None else {"checkpoint": folder, "resume": "auto"}
        loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=4)
        trainer.fit(model, optimizer, loader, step=squared_error, epochs=epochs, **arguments)
        held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        return [p.detach().clone() for p in held], torch.rand(3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Noisy, NoisyLater])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_ranks_keep_the_same_weights(two_ranks, backend, kind):
    (first, drawn), (second, others) = two_ranks.run(fit, backend, 2, None, kind)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(drawn, others)


@pytest.mark.slow
def test_a_resumed_run_draws_what_one_without_a_break_does(two_ranks, tmp_path):
    expected = two_ranks.run(fit, "ddp", 3)
    two_ranks.run(fit, "ddp", 1, tmp_path)
    for (found, _), (weights, _) in zip(two_ranks.run(fit, "ddp", 3, tmp_path), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


class GradientNoise(Callback):
    def __init__(self, model):
        self.model, self.drawn = model, []

    def on_optimizer_step(self, run, grad_norm):
        for parameter in self.model.parameters():
            self.drawn.append(torch.randn_like(parameter.grad))
            parameter.grad.add_(self.drawn[-1], alpha=0.1)


def train_with_noise(by_loop):
    """Return the weights, what the callback drew, and what the rank draws afterwards."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=4)
    noise = GradientNoise(model)
    with Trainer(devices="cpu", seed=2, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if by_loop:
            prepared, optimizer, batches = trainer.prepare(model, optimizer, loader)
            state = {"model": prepared, "optimizer": optimizer}
            with trainer.loop(batches, epochs=1, callbacks=[noise], state=state) as loop:
                for batch in loop:
                    optimizer.zero_grad()
                    trainer.backward(trainer.run(squared_error, prepared, batch))
                    trainer.update(prepared, optimizer)
        else:
            trainer.fit(model, optimizer, loader, step=squared_error, callbacks=[noise])
        return [p.detach().clone() for p in model.parameters()], noise.drawn, torch.rand(3)


@pytest.mark.parametrize("by_loop", [False, True])
def test_ranks_keep_the_same_weights_where_a_callback_draws_noise(two_ranks, by_loop):
    ours, theirs = two_ranks.run(train_with_noise, by_loop)
    assert all(map(torch.equal, ours[0], theirs[0]))
    assert not torch.equal(ours[2], theirs[2])
    assert len({str(drawn.flatten()[:2]) for drawn in ours[1]}) == len(ours[1])  # each step draws its own


def uneven(backend):
    """Return the error where ranks have parts of several sizes, and parameters in common."""
    model = perceptron(4, 7, 2, dtype=torch.float32)
    torch.optim.SGD(model.parameters())  # from here on torch calls hooks for the step of Noisy's base, too
    if backend == "shard":
        ts = pytest.importorskip("tp_shard")
        ts.distributed.init_process_group()
        model = ts.parallelize(model, {"0": ts.Column(), "2": ts.Row()})
    else:
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
    x = torch.ones(8, 4)
    try:
        with Trainer(backend=backend, devices="cpu", seed=2, progress=False) as trainer:
            loader = DataLoader(TensorDataset(x, x[:, :2]), batch_size=4)
            with pytest.raises(ConfigError) as caught:
                trainer.fit(model, Noisy(model.parameters(), lr=0.1), loader, step=scaled)
    finally:
        if backend == "shard":
            ts.distributed.destroy_process_group()
    return str(caught.value)


def scaled(model, batch):
    return squared_error(model, batch) * getattr(model, "scale", 1)


@pytest.mark.parametrize("backend", ["fsdp", "shard"])
def test_draws_that_would_part_what_ranks_have_in_common_are_refused(two_ranks, backend):
    for message in two_ranks.run(uneven, backend):
        assert message.startswith("Noisy draws random numbers, and here another number of them on each rank")
