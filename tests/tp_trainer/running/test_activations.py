"""Activations that are computed again in backward: the same numbers everywhere, and less that is kept."""

import copy

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError, ModelError
from tp_core.testing import run_ranks
from tp_trainer import FsdpOptions, Trainer, checkpoint_activations

from tests.tp_trainer.callback_run import BACKENDS, data, step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.outer(self.drop(torch.tanh(self.inner(x))))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), Block(), Block(), nn.Linear(4, 1)).double()


def kept_elements(model):
    """Return how many elements a forward pass keeps for backward."""
    counts = []

    def pack(tensor):
        counts.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(64, 3, dtype=torch.float64)).sum()
    loss.backward()
    return sum(counts)


def trained(backend, *, again, options=None):
    """Return weights after two epochs, with or without computing again."""
    model = network()
    if again:
        checkpoint_activations(model, Block)
    settings = BACKENDS.get(backend, {"backend": backend, "devices": "cpu", "options": options})
    with Trainer(**settings, seed=3, progress=False) as trainer:
        loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step, epochs=2)
        return {name: tensor.clone() for name, tensor in trainer.session.model_state(model).items()}


def compare(backend, options=None):
    """Return whether both ways lead to the same weights, bit for bit."""
    plain, again = (trained(backend, again=again, options=options) for again in (False, True))
    return plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("backend", ["single", "tuple", "dp-gather"])
def test_the_numbers_are_the_same_on_devices_of_one_process(backend):
    pytest.importorskip("tp_tuple" if backend == "tuple" else "tp_dp_gather")
    assert compare(backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", None),
        ("fsdp", FsdpOptions(units=Block)),
        ("fsdp", FsdpOptions(units=Block, activation_checkpointing=True)),
    ],
)
def test_the_numbers_are_the_same_on_several_ranks(backend, options):
    assert all(run_ranks(compare, 2, backend, options))


def test_less_is_kept_for_backward():
    model = network()
    plain = kept_elements(model)
    checkpoint_activations(model, Block)
    checkpoint_activations(model, "Block")  # a second time changes nothing
    assert kept_elements(model) < plain / 2


def test_a_module_stays_what_it_is():
    model = network()
    names = list(model.state_dict())
    checkpoint_activations(model, Block)
    assert list(model.state_dict()) == names
    assert isinstance(model[1], Block)
    assert repr(model) == repr(network())
    copied = copy.deepcopy(model).eval()
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(copied(x), network().eval()(x))
    with torch.no_grad():
        assert torch.equal(copied(x), network().eval()(x))


@pytest.mark.parametrize(
    ("kinds", "error", "words"),
    [
        ([nn.LSTM], ModelError, "no module of the class 'LSTM'; it has Block, Dropout, Linear, Sequential"),
        (["Blok"], ModelError, "did you mean 'Block'"),
        ([], ConfigError, "needs classes of modules"),
        ([network()], ConfigError, "needs classes of modules"),
    ],
)
def test_a_class_that_the_model_has_not_is_refused(kinds, error, words):
    with pytest.raises(error, match=words):
        checkpoint_activations(network(), *kinds)
