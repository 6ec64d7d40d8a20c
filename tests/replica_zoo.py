"""Models, batches and the reference for equality tests of everything that is built on replicas.

The reference is the plain module that runs the parts one after the other: part 0 as it is, the
others with the buffers as they were before, since the statistics of replica 0 are those that live
on. For models without such buffers that is the whole batch, to rounding.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Graphs:
    """A batch object of a user's own: node features, and which graph each node is of."""

    def __init__(self, x: Tensor, graph: Tensor, count: int) -> None:
        self.x, self.graph, self.count = x, graph, count

    def to(self, device: Any, non_blocking: bool = False) -> "Graphs":
        move = {"device": device, "non_blocking": non_blocking}
        return Graphs(self.x.to(**move), self.graph.to(**move), self.count)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        # As people write it: a replica has parameters of its own to find.
        x = x.to(next(self.parameters()).dtype)
        penalty = sum(weight.square().mean() for weight in self.parameters())
        return self.head(self.lstm(x)[0][:, -1]) + penalty


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens))).mean(1)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, graphs: Graphs) -> Tensor:
        h = self.node(graphs.x).tanh()
        pooled = h.new_zeros(graphs.count, 6).index_add(0, graphs.graph, h)
        return self.head(pooled)


@dataclass(frozen=True)
class Case:
    """A model, and the parts of a batch: pairs of input and target, some of unequal size."""

    make: Callable[[], nn.Module]
    make_input: Callable[[int], Any]
    classes: int = 3

    def parts(self, count: int) -> list[tuple[Any, Tensor]]:
        torch.manual_seed(3)
        sizes = [4 - i % 2 for i in range(count)]
        return [(self.make_input(n), torch.randint(self.classes, (n,))) for n in sizes]


def _graphs(count: int) -> Graphs:
    sizes = [2 + i % 3 for i in range(count)]
    graph = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
    return Graphs(torch.randn(sum(sizes), 4).double(), graph, count)


CASES: dict[str, Case] = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda n: torch.randn(n, 6).double(),
    ),
    "conv": Case(ConvNet, lambda n: torch.randn(n, 2, 6, 6).double()),
    "lstm": Case(Lstm, lambda n: torch.randn(n, 3, 4).double()),
    "transformer": Case(TiedTransformer, lambda n: torch.randint(11, (n, 5)), classes=11),
    "graphs": Case(GraphNet, _graphs),
}


def make_model(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CASES[name].make().double()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum")


def in_turn(model: nn.Module, inputs: list[Any]) -> list[Tensor]:
    """Return the plain module's outputs for the parts."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = [model(inputs[0])]
    for part in inputs[1:]:
        buffers = {name: buffer.clone() for name, buffer in before.items()}
        outputs.append(torch.func.functional_call(model, buffers, (part,)))
    return outputs


def check_equal_training(
    name: str,
    count: int,
    forward: Callable[[nn.Module], Callable[[list[Any]], list[Tensor]]],
    *,
    device: str = "cpu",
    steps: int = 20,
) -> None:
    """Train a model and its reference for some steps: outputs, gradients and states are equal.

    ``forward(model)`` returns what maps inputs of the parts to outputs of the parts.
    """
    model = make_model(name).to(device)
    reference = copy.deepcopy(model)
    under_test = forward(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (reference, model)]
    parts = CASES[name].parts(count)
    inputs = [x.to(device) for x, _ in parts]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = in_turn(reference, inputs)
        found = under_test([x for x, _ in parts])
        for a, b, (_, target) in zip(expected, found, parts, strict=True):
            torch.testing.assert_close(b.to(device), a)
            assert target.shape[0] == b.shape[0]
        for outputs in (expected, found):
            losses = [loss_of(y, t.to(y.device)).to(device) for y, (_, t) in zip(outputs, parts, strict=True)]
            torch.stack(losses).sum().backward()
        gradients = [[p.grad for p in m.parameters()] for m in (reference, model)]
        torch.testing.assert_close(gradients[1], gradients[0])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
