"""Cuts cover what they cut, and shards of one tensor differ by at most one."""

import pytest
import torch
import tp_shard as ts
from hypothesis import given
from hypothesis import strategies as st


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
