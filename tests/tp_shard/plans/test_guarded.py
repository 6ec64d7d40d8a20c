"""A plan that lets a model's own code meet shards is one error of this package, and nobody waits."""

import copy
import pickle

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core.errors import ConfigError, ModelError
from tp_testing import rank_outcomes


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 5
        self.qkv, self.out = nn.Linear(10, 30), nn.Linear(10, 10)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, 2).transpose(1, 3).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(10)

    def forward(self, x):
        return self.norm(x + self.attention(x))


PLAN = {"attention.qkv": ts.Column(heads=5, holds="qkv"), "attention.out": ts.Row(heads=5)}
LOCAL = {"attention": ts.Local(heads=5, query=("num_heads",))}


def a_module_that_counts_all_heads_is_named_with_what_to_write():
    split = ts.parallelize(Model(), PLAN)
    message = r"attention: RuntimeError: .* qkv makes 1\d of 30 features; .*\{\"attention\": ts.Local\(heads="
    with pytest.raises(ModelError, match=message) as caught:
        split(torch.randn(2, 3, 10))
    assert isinstance(caught.value.__cause__, RuntimeError)


def errors_elsewhere_stay_what_they_are():
    split = ts.parallelize(Model(), PLAN | LOCAL)
    with pytest.raises(RuntimeError, match="normalized_shape") as caught:
        split.norm(torch.randn(2, 3, 9))
    assert not isinstance(caught.value, ModelError)
    with pytest.raises(ConfigError, match="is 9 wide, and this rank's weight takes 10"):
        split(torch.randn(2, 3, 9))


def a_guarded_model_is_one_of_its_class():
    whole = Model()
    split = ts.parallelize(copy.deepcopy(whole), PLAN | LOCAL)
    x = torch.randn(2, 3, 10)
    assert isinstance(split, Model)
    assert type(split).__name__ == "Model"
    torch.testing.assert_close(split(x), whole(x))
    torch.testing.assert_close(copy.deepcopy(split)(x), whole(x))
    assert copy.deepcopy(split).split_blocks == {"attention"}
    part = ts.parallelize(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), {"0": ts.Column(), "1": ts.Row()})
    torch.testing.assert_close(pickle.loads(pickle.dumps(part))(x[..., :4]), part(x[..., :4]))


def an_input_with_other_heads_than_declared_is_named():
    plan = {"qkv": PLAN["attention.qkv"], "out": PLAN["attention.out"]}
    whole = Attention()
    split = ts.parallelize(
        copy.deepcopy(whole), plan | {"": ts.Local(heads=5, query=("num_heads",), inputs=("mask",))}
    )
    x = torch.randn(2, 3, 10)
    for heads in (1, 5):
        mask = torch.randn(2, heads, 3, 3)
        torch.testing.assert_close(split(x, mask), whole(x, mask))
    with pytest.raises(ModelError, match=r"'mask' of Attention has shape \(2, 4, 3, 3\), .* it has 5 heads"):
        split(x, torch.randn(2, 4, 3, 3))
    with pytest.raises(ModelError, match=r"'mask' of Attention has shape \(3, 3\)"):
        split(x, torch.randn(3, 3))


CHECKS = [
    a_module_that_counts_all_heads_is_named_with_what_to_write,
    errors_elsewhere_stay_what_they_are,
    a_guarded_model_is_one_of_its_class,
    an_input_with_other_heads_than_declared_is_named,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, check):
    on_ranks(2, check)


def _one_rank_fails():
    ts.distributed.init_process_group()
    split = ts.parallelize(Model(), PLAN | LOCAL)
    if ts.distributed.get_rank() == 1:
        split.attention.num_heads = 5
    split(torch.randn(2, 3, 10))


@pytest.mark.slow
def test_a_rank_that_raises_lets_the_others_end():
    outcomes = rank_outcomes(_one_rank_fails, 2)
    assert "ModelError: attention: RuntimeError" in outcomes[1].error
    assert outcomes[0].error is not None  # its collective ended with the other's connection
    assert all(outcome.exitcode is not None for outcome in outcomes)
