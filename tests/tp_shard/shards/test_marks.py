"""Marks say along which dimension a tensor is split; they stay with it, and no layer needs them."""

import copy
import io
import pickle

import pytest
import torch
import tp_shard as ts
from tp_core.errors import ConfigError
from tp_core.tensors import is_sharded

from tests.tp_shard.on_each_rank import own

d = ts.distributed
Linear, Embedding = ts.nn.ParallelLinear, ts.nn.ParallelEmbedding


def marks_stay_with_parameters_and_are_needed_by_nobody():
    n = d.get_world_size()
    layer = Linear(9, 9, dim=-1)
    table = Embedding(9, 9, dim=0)
    for made in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).double(),
        layer.to("cpu"),
    ):
        assert ts.get_parallel_dim(made.weight) == -1
        assert is_sharded(made.bias) == (n > 1)
        assert made(torch.ones(2, 9, dtype=made.weight.dtype)).shape == (2, own(torch.empty(9), 0).numel())
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert ts.get_parallel_dim(layer.weight) == -1
    assert ts.get_parallel_dim(table.weight) == 0
    x = torch.ones(2, 9)
    for mode in (True, False):
        out = layer.train(mode)(x)
        assert ts.get_parallel_dim(out) == -1
        assert ts.get_parallel_dim(x) is None
    assert ts.get_parallel_dim(Linear(9, 9, dim=0)(x)) is None
    torch.save(layer.state_dict(keep_vars=True), buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == {"weight", "bias"}


def test_without_a_process_group():
    marks_stay_with_parameters_and_are_needed_by_nobody()


@pytest.mark.parametrize("world", [2, 4])
def test_on_ranks(on_ranks, world):
    on_ranks(world, marks_stay_with_parameters_and_are_needed_by_nobody)


def test_tensors_and_parameters_get_marks_by_hand():
    x = torch.empty(3)
    assert ts.get_parallel_dim(x) is None
    ts.register_parallel_dim(x, 0)
    assert ts.get_parallel_dim(x) == 0
    ts.register_parallel_dim(x, None)
    assert ts.get_parallel_dim(x) is None
    with pytest.raises(ConfigError, match="got 3"):
        ts.register_parallel_dim(x, 3)
    parameter = torch.empty(20, 30)
    ts.register_parallel_attribute(parameter, -1, 1)
    assert ts.get_parallel_dim(parameter) == -1
    assert getattr(parameter, ts._PARALLEL_DIM) == -1
    assert getattr(parameter, ts._ORDER_TYPE) == 1
    with pytest.raises(ConfigError, match="order_type is 0"):
        ts.register_parallel_attribute(parameter, -1, 2)
