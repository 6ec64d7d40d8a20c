from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError
from tp_shard._partition import bounds, shard_sizes


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
