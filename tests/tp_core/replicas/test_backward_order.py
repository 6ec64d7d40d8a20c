"""Gradients are added in the same order, whatever threads did before and whichever thread runs a part."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from tp_core.replicas import Replicas

STEPS, COUNT = 3, 3


class Heads(nn.Module):
    """A module with several outputs, which uses one weight in each of them."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(7, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.trunk(torch.tanh(self.trunk(x))))
        a, b, c = (torch.tanh(self.trunk(head(h))) for head in self.heads)
        return {"c": c, "a": a, "b": [b]}


def gradients(*, in_turn=(False,), force_copies=False, twice=False):
    """Return all gradients of some steps, in which parts meet in several ways, as one tensor."""
    torch.manual_seed(0)
    net, gen = Heads(), nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    nets, gens = (Replicas(m, ["cpu"] * COUNT, force_copies=force_copies) for m in (net, gen))
    shared = torch.randn(5, 7, requires_grad=True)
    parameters = [shared, *net.parameters(), *gen.parameters()]
    calls = 0

    def run(replicas, parts):
        nonlocal calls
        calls += 1
        # Within a mode all parts run in the caller's thread.
        with BaseTorchFunctionMode() if in_turn[calls % len(in_turn)] else nullcontext():
            return replicas.run(lambda replica, part: replica(part), parts)

    found = []
    for _ in range(STEPS):
        noise = torch.randn(5 * COUNT, 7)
        outputs = []
        for i in range(2):
            fake = torch.cat(run(gens, (noise + i).split(5)))
            outputs += [run(nets, [rows + shared for rows in fake.split(5)]), run(nets, [shared] * COUNT)]
        loss = sum((parts[1]["a"] * parts[0]["b"][0]).sum() for parts in outputs)
        for i, parts in enumerate(outputs):
            loss = loss + sum((1.3 + i) * torch.cat([p[key] for p in parts]).square().mean() for key in "ac")
        if twice:
            slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            loss = sum(slope.square().sum() for slope in slopes if slope is not None)
        given = torch.autograd.grad(loss, parameters, allow_unused=True)
        found += [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, given, strict=True)]
    return torch.cat([g.flatten() for g in found])


def in_a_new_thread(call):
    """Return what ``call`` returns in a thread in which autograd numbers from 0, as in a new process."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(800)
    return found[0]


def make_nodes(count):
    x = torch.ones((), requires_grad=True)
    for _ in range(count):
        x * 1


@pytest.mark.parametrize("options", [{}, {"force_copies": True}, {"twice": True}], ids=str)
def test_equal_runs_have_equal_bits(options):
    expected = in_a_new_thread(lambda: gradients(**options))
    make_nodes(1000)
    assert torch.equal(gradients(**options), expected)
    assert torch.equal(gradients(**options, in_turn=(True, False, False)), expected)
    assert torch.equal(in_a_new_thread(lambda: gradients(**options, in_turn=(True,))), expected)


def test_values_without_nodes_and_lists_that_contain_themselves_pass():
    replicas = Replicas(nn.Linear(1, 1), ["cpu"] * 2)
    endless = []
    endless.append(endless)
    results = replicas.run(lambda replica, part: [part, replica(torch.ones(1, 1)), endless], [endless, None])
    assert [result[0] for result in results] == [endless, None]
