"""Replicas compute what the module by itself computes."""

import pytest
import torch
from torch import nn
from tp_core.replicas import Replicas

from tests.accelerator import GPU, SECOND, needs_two

NAMES = ["mlp", "conv", "lstm", "transformer", "graphs"]


def call(replica, part):
    return replica(part)


FAST = {(3, False), (3, True), (2, "flat")}


@pytest.mark.parametrize(
    ("count", "force_copies"),
    [
        pytest.param(
            n, c, marks=() if (n, c) in FAST else pytest.mark.slow if n == 4 else pytest.mark.nightly
        )
        for n in (1, 2, 3, 4)
        for c in (False, True, "flat")
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_the_module_by_itself(zoo, name, count, force_copies):
    def forward(model):
        replicas = Replicas(model, ["cpu"] * count, force_copies=force_copies)
        return lambda inputs: replicas.run(call, inputs)

    zoo.check_equal_training(name, count, forward)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU], [GPU, "cpu"]])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_with_a_gpu_are_those_of_the_module_by_itself(zoo, name, devices):
    def forward(model):
        replicas = Replicas(model, devices)
        return lambda inputs: replicas.run(
            lambda replica, part: replica(part[0].to(part[1])),
            list(zip(inputs, devices, strict=True)),
        )

    zoo.check_equal_training(name, len(devices), forward, device=GPU)


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_on_two_gpus_are_those_of_the_module_by_itself(zoo, name):
    devices = [GPU, SECOND]

    def forward(model):
        replicas = Replicas(model, devices)
        return lambda inputs: replicas.run(
            lambda replica, part: replica(part[0].to(part[1])),
            list(zip(inputs, devices, strict=True)),
        )

    zoo.check_equal_training(name, 2, forward, device=GPU)


@pytest.mark.parametrize("force_copies", [False, True, "flat"], ids=["shared", "copied", "flat"])
@pytest.mark.parametrize("sizes", [(4, 3, 1), (1, 1), (5,)])
def test_the_sum_over_parts_is_the_gradient_of_the_whole_batch(sizes, force_copies):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    x = torch.randn(sum(sizes), 5).double()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    replicas = Replicas(model, ["cpu"] * 3, force_copies=force_copies)
    losses = replicas.run(lambda replica, part: replica(part).square().sum(), x.split(sizes))
    torch.stack(losses).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def test_gradients_of_gradients_pass_through_the_copies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    parameters = list(model.parameters())
    x = torch.randn(4, 3).double()

    def penalty(loss):
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters[0])

    expected = penalty(model(x).square().sum())
    replicas = Replicas(model, ["cpu"] * 3, force_copies=True)
    losses = replicas.run(lambda replica, part: replica(part).square().sum(), x.split([2, 1, 1]))
    torch.testing.assert_close(penalty(torch.stack(losses).sum()), expected)


def test_sparse_gradients_add_up():
    model = nn.Embedding(6, 3, sparse=True).double()
    replicas = Replicas(model, ["cpu"] * 3, force_copies=True)
    parts = [torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([5])]
    torch.stack(replicas.run(lambda r, p: r(p).sum(), parts)).sum().backward()
    assert model.weight.grad.is_sparse
    rows = model.weight.grad.to_dense()[:, 0]
    torch.testing.assert_close(rows, torch.tensor([1.0, 2, 1, 0, 0, 1]).double())


def test_a_parameter_that_one_replica_leaves_out_gets_the_others_gradient():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(()))
            self.b = nn.Parameter(torch.ones(()))

        def forward(self, which):
            return self.a * 2 if which == "a" else self.b * 3

    model = Either()
    replicas = Replicas(model, ["cpu"] * 4, force_copies=True)
    sum(replicas.run(call, ["a", "a", "b", "a"])).backward()
    assert (model.a.grad.item(), model.b.grad.item()) == (6.0, 3.0)
