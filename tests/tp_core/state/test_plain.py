"""Plain values come back from JSON as they were, whatever JSON itself would make of them."""

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import StateError
from tp_core.state import from_json, to_json

keys = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=2)),
)
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
values = st.recursive(
    st.one_of(
        atoms,
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.builds(Counter, st.dictionaries(keys, st.integers())),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$dict", "$", "a"]), inner, max_size=2),
        st.dictionaries(keys, inner, max_size=2).map(lambda found: defaultdict(list, found)),
    ),
)


def types(value):
    """The types in a value, in the order in which one comes to them."""
    if isinstance(value, dict):
        return [type(value), *[t for pair in value.items() for item in pair for t in types(item)]]
    if isinstance(value, list | tuple):
        return [type(value), *[t for item in value for t in types(item)]]
    return [type(value)]


@given(values)
def test_what_was_written_is_read(value):
    found = from_json(to_json("it", value))
    assert found == value
    assert types(found) == types(value)


def test_what_makes_missing_values_is_read_where_it_is_known():
    found = from_json(to_json("it", {"known": defaultdict(int, a=1), "own": defaultdict(lambda: 3, a=1)}))
    assert found["known"]["b"] == 0
    assert type(found["own"]) is dict


def test_what_is_not_finite_is_kept():
    nan, infinity = from_json(to_json("it", [math.nan, -math.inf]))
    assert math.isnan(nan)
    assert infinity == -math.inf


@pytest.mark.parametrize(
    "value", [object(), torch.ones(2), {"deep": [(torch.nn.Linear(1, 1),)]}, 1j, b"bytes"]
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(StateError, match="the state of the run holds what a checkpoint does not"):
        to_json("the state of the run", value)
