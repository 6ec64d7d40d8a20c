"""Tensors that a forward keeps on its modules: each replica goes on with those of its own rows."""

import copy

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas


class Recurrent(nn.Module):
    """Keeps its hidden state, as in truncated backpropagation through time."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.state = None

    def forward(self, x):
        state = self.cell(x, self.state)
        self.state = state.detach()
        return state


def make():
    torch.manual_seed(0)
    return Recurrent()


def steps(number=4):
    return torch.randn(number, 6, 3, generator=torch.Generator().manual_seed(1))


def run(replicas, x):
    parts = x.chunk(len(replicas))
    return torch.cat(replicas.run(lambda replica, part: replica(part), parts))


@pytest.mark.parametrize("force_copies", [False, True])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_hidden_state_is_of_the_replicas_own_rows(devices, force_copies):
    alone, module = make(), make()
    replicas = Replicas(module, ["cpu"] * devices, force_copies=force_copies)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, module)]
    for x in steps():
        expected, found = alone(x), run(replicas, x)
        torch.testing.assert_close(found, expected)
        for optimizer, output in zip(optimizers, (expected, found), strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()


class Long(Recurrent):
    """Keeps two states, in a container that each forward makes anew."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.kind = nn.LSTMCell(3, 4), kind

    def forward(self, x):
        state = self.state
        if state is not None:
            state = tuple(state.values()) if isinstance(state, dict) else tuple(state)
        hidden, cell = self.cell(x, state)
        kept = hidden.detach(), cell.detach()
        self.state = {"h": kept[0], "c": kept[1]} if self.kind is dict else self.kind(kept)
        return hidden


@pytest.mark.parametrize("force_copies", [False, True])
@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_states_in_a_container_are_of_the_replicas_own_rows(kind, force_copies):
    torch.manual_seed(0)
    module = Long(kind)
    alone = copy.deepcopy(module)
    replicas = Replicas(module, ["cpu"] * 3, force_copies=force_copies)
    for x in steps():
        torch.testing.assert_close(run(replicas, x), alone(x))
    module.state = alone.state = None
    for x in steps():
        torch.testing.assert_close(run(replicas, x), alone(x))


@pytest.mark.parametrize("value", [None, torch.full((2, 4), 0.5)], ids=["cleared", "set"])
def test_a_state_that_the_program_sets_is_every_replicas(value):
    alone, module = make(), make()
    replicas = Replicas(module, ["cpu"] * 3)
    first, second, third, _ = steps()
    for x in (first, second):
        alone(x)
        run(replicas, x)
    module.state = value
    alone.state = None if value is None else torch.full((6, 4), 0.5)
    for x in (third, first):
        torch.testing.assert_close(run(replicas, x), alone(x))


def test_what_a_forward_leaves_to_look_at_costs_no_other_call():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            self.shown = self.layer(x)
            return self.shown.relu()

    torch.manual_seed(0)
    module = Shown()
    replicas = Replicas(module, ["cpu"] * 2)
    for x in steps():
        torch.testing.assert_close(run(replicas, x), module.layer(x).relu())
