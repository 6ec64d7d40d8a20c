"""A fault that is planted in tp-shard's own collectives is named on eight pretended ranks."""

import re

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn

# Private: faults of the layers are planted where their collectives are.
from tp_shard._groups import _collectives
from tp_shard.nn import _split_products

RANKS = 8
PLAN = {
    "table": ts.Vocab(),
    "up": ts.Column(),
    "down": ts.Row(),
    "head": ts.Column(gather_output=True),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))


def fault(plan=PLAN):
    torch.manual_seed(0)
    return str(ts.verify(Model(), plan, torch.randint(24, (3, 5)), ranks=RANKS).fault)


def largest_for_sum(monkeypatch):
    def wrong(tensor, group, *, layer=None):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle)
        return tensor

    monkeypatch.setattr(_split_products, "all_reduce_", wrong)


def mean_for_sum(monkeypatch):
    right = _split_products.all_reduce_

    def wrong(tensor, group, *, layer=None):
        return right(tensor, group, layer=layer).div_(group.size)

    monkeypatch.setattr(_split_products, "all_reduce_", wrong)


def missing_all_reduce(monkeypatch):
    class Nothing:
        def wait(self):
            pass

    monkeypatch.setattr(_split_products, "start_all_reduce_", lambda tensor, group, *, layer: Nothing())


def scaled_twice(monkeypatch):
    right = _collectives._AllGather.backward

    def wrong(ctx, grad):
        mine, *rest = right(ctx, grad)
        return mine * len(ctx.sizes), *rest

    monkeypatch.setattr(_collectives._AllGather, "backward", staticmethod(wrong))


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (largest_for_sum, r"down: outputs differ .*: what reaches it is right .* the sum over ranks, is not"),
        (mean_for_sum, r"down: outputs differ .*: what reaches it is right .* the sum over ranks, is not"),
        (missing_all_reduce, r"down: the gradient of down.weight differs .*: what follows it goes backward"),
        (scaled_twice, r"head: the gradient of head.weight differs .*: it is 8 times too large"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_of_a_collective_is_named(monkeypatch, plant, says):
    plant(monkeypatch)
    assert re.match(says, fault()), fault()


def test_a_weight_that_is_cut_along_the_other_dimension_is_named():
    # The sum of the residual branch is the model's own line, in which 16 features meet 2 of a rank.
    said = fault({**PLAN, "up": ts.Row(), "down": ts.Column()})
    assert said.startswith("the model: RuntimeError in its forward: The size of tensor a (16) must match"), (
        said
    )


def test_the_model_is_right_without_a_fault():
    assert fault() == "None"
