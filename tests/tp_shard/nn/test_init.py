"""Shards get the values that the whole tensor would have had, and no rank holds the whole."""

import pytest
import torch
import tp_shard as ts
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

# private: any split, without its ranks, and methods that no layer uses
from tp_shard._groups._group import ALONE, current_group
from tp_shard._shards import get_split
from tp_shard._split import Split
from tp_shard.nn import _init as shard_init

from tests.tp_shard.on_each_rank import own

d, init = ts.distributed, nn.init


def initialize(method, shard, **kwargs):
    """Fill a shard as a layer does, by the split that its marks say."""
    group = current_group() or ALONE
    shard_init.init_shard_(method, shard, get_split(shard, group), group, kwargs)


METHODS = [
    (init.uniform_, {"a": -2.0, "b": 3.0}),
    (init.normal_, {"mean": 1.0, "std": 0.5}),
    (init.constant_, {"val": 0.1}),
    (init.ones_, {}),
    (init.zeros_, {}),
    (init.kaiming_normal_, {"a": 0, "mode": "fan_in", "nonlinearity": "leaky_relu"}),
    (init.kaiming_uniform_, {"mode": "fan_out"}),
    (init.xavier_normal_, {"gain": 2.0}),
    (init.xavier_uniform_, {}),
    (init.trunc_normal_, {"std": 0.5, "a": -1.0, "b": 1.0}),
    (init.orthogonal_, {}),
    (init.sparse_, {"sparsity": 0.3}),
    (init.eye_, {}),
    (lambda t: t.normal_().mul_(0.02).clamp_(-0.03, 0.03), {}),
    (lambda t: t.copy_(torch.arange(t.numel()).reshape(t.shape)), {}),
]


def every_method_gives_the_values_of_the_whole_tensor():
    for method, kwargs in METHODS:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            if dtype == torch.bfloat16 and method is init.orthogonal_:
                continue  # torch has no such decomposition
            for dim, axis in [(1, 0), (0, 1)]:
                torch.manual_seed(5)
                expected = torch.empty(23, 9, dtype=dtype)
                method(expected, **kwargs)
                after = torch.rand(1)
                layer = ts.nn.ParallelLinear(9, 23, dim=dim, dtype=dtype)
                torch.manual_seed(5)
                initialize(method, layer.weight, **kwargs)
                assert torch.equal(layer.weight, own(expected, axis)), method
                assert torch.equal(torch.rand(1), after)
                assert layer.weight.dtype == dtype
    torch.manual_seed(5)
    bias = init.uniform_(torch.empty(23))
    torch.manual_seed(5)
    layer = ts.nn.ParallelLinear(9, 23, dim=1)
    torch.manual_seed(5)
    initialize(init.uniform_, layer.bias)
    assert torch.equal(layer.bias, own(bias, 0))


def a_marked_tensor_and_a_generator_of_ones_own_are_honoured():
    expected = init.normal_(torch.empty(6, 8), generator=torch.Generator().manual_seed(9))
    for order_type, dim, axis in [(0, -1, 0), (1, -1, 1), (0, 0, 1), (1, 0, 0)]:
        tensor = own(torch.empty(6, 8), axis).clone()
        ts.register_parallel_attribute(tensor, dim, order_type, size=expected.size(axis))
        initialize(init.normal_, tensor, generator=torch.Generator().manual_seed(9 + d.get_rank()))
        assert torch.equal(tensor, own(expected, axis))
    plain = torch.empty(3)
    initialize(init.uniform_, plain)
    if d.get_world_size() > 1:
        copies = d.gather(plain.reshape(1, 3), 0)
        assert (copies == copies[0]).all()


CHECKS = [
    every_method_gives_the_values_of_the_whole_tensor,
    a_marked_tensor_and_a_generator_of_ones_own_are_honoured,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    check()


def building_peaks_at_the_shard_and_a_block():
    import resource

    rows, width = 600_000, 64  # 146 MiB in all, 73 on each rank
    small = ts.nn.ParallelLinear(width, 2 * d.get_world_size(), dim=1)  # whatever is loaded once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = ts.nn.ParallelLinear(width, rows, bias=False, dim=1)
    rose = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    shard = layer.weight.numel() * 4 / 2**20
    assert small.weight.numel()
    assert rose < shard + 24, (rose, shard)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


def test_building_peaks_at_the_shard_and_a_block(on_ranks):
    on_ranks(2, building_peaks_at_the_shard_and_a_block, fresh=True)  # a process knows its highest peak alone


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    normal=st.booleans(),
    block=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_drawing_in_blocks_equals_drawing_the_whole(shape, data, normal, block, dtype):
    method = init.normal_ if normal else init.uniform_
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.integers(1, 5))
    torch.manual_seed(1)
    expected = method(torch.empty(shape, dtype=dtype))
    after = torch.rand(1)
    split = Split.even(dim, shape[dim], parts)
    for rank in range(parts):
        shard = torch.empty(split.local_shape(tuple(shape), rank), dtype=dtype)
        operations = shard_init._record(method, tuple(shape), shard, {})
        assert operations is not None
        torch.manual_seed(1)
        before, shard_init._BLOCK = shard_init._BLOCK, block
        try:
            shard_init._replay(operations, shard, split, rank)
        finally:
            shard_init._BLOCK = before
        assert torch.equal(shard, split.take(expected, rank))
        assert torch.equal(torch.rand(1), after)
