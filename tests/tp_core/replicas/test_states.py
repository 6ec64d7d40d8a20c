"""Tensors that a forward keeps on its modules: each replica goes on with those of its own rows."""

import copy
import threading

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


def test_what_a_hook_keeps_in_a_dict_of_the_program_is_of_the_part_that_runs():
    module, kept = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), {}

    def own_rows(replica, part):
        replica(part)
        own = threading.get_ident()
        return kept["hidden"], replica[0](part).tanh(), own

    parts = [torch.randn(2, 3) for _ in range(3)]
    replicas = Replicas(module, ["cpu"] * 3)
    replicas.run(lambda replica, part: replica(part), parts)
    assert not replicas.runs_in_turn
    handle = module[1].register_forward_hook(lambda _module, _args, output: kept.update(hidden=output))
    found = replicas.run(own_rows, parts)
    for hidden, expected, thread in found:
        torch.testing.assert_close(hidden, expected)
        assert thread == threading.get_ident()
    handle.remove()
    replicas.run(lambda replica, part: replica(part), parts)
    assert not replicas.runs_in_turn


class Momentum(nn.Module):
    """Moves a frozen encoder in forward, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(requires_grad=False)
        self.embed = nn.Embedding(4, 2, max_norm=0.1)

    def forward(self, x):
        if self.training:
            self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)
        return self.query(x) - self.key(x) + self.embed(torch.zeros(len(x), dtype=torch.long))


def test_parameters_that_parts_write_are_named_once(caplog):
    module = Momentum().eval()
    replicas = Replicas(module, ["cpu"] * 2)
    run(replicas, torch.ones(4, 3))
    assert caplog.messages == []
    module.train()
    for _ in range(3):
        run(replicas, torch.ones(4, 3))
    assert [message.partition(",")[0] for message in caplog.messages] == ["forward"]
    assert "or the step, writes the parameter 'key.weight' on each of 2 devices" in caplog.text
