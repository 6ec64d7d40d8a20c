"""Cuts cover what they cut, and shards of one tensor differ by at most one."""

from itertools import pairwise

import pytest
import torch
import tp_shard as ts
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError
from tp_shard._split import bounds, shard_sizes


@given(length=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_shards_cover_the_dimension_and_differ_by_one_at_most_larger_first(length, parts):
    edges = [bounds(length, parts, i) for i in range(parts)]
    assert edges[0][0] == 0
    assert edges[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    sizes = [b - a for a, b in edges]
    assert sizes == shard_sizes(length, parts) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_less_than_one_part_is_refused():
    with pytest.raises(ConfigError, match="1 part or more, got 0"):
        shard_sizes(3, 0)


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), parts=st.integers(1, 9), data=st.data())
def test_slices_cover_a_tensor_in_order(shape, parts, data):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dim = data.draw(st.sampled_from([None, *range(-len(shape), len(shape))]))
    shards = ts.slice(tensor, parts, dim, contiguous=data.draw(st.booleans()))
    assert torch.equal(torch.cat(shards, -1 if dim is None else dim), tensor)
    sizes = [s.size(-1 if dim is None else dim) for s in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_slice_of_the_manual_and_what_it_refuses():
    one, two = ts.slice(torch.empty(3, 10), 2, dim=-1)
    assert one.shape == two.shape == (3, 5)
    assert not one.is_contiguous()
    assert ts.slice(torch.empty(3, 10), 2, dim=-1, contiguous=True)[0].is_contiguous()
    with pytest.raises(ValueError, match="cannot cut along dim 2"):
        ts.slice(torch.empty(3, 10), 2, dim=2)
    with pytest.raises(ValueError, match="num_partitions=0"):
        ts.slice(torch.empty(3), 0)
