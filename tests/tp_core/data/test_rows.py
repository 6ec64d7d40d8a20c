"""Rows of several parts become those of the whole batch, in its order."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core.data import Parts, SampleRows, combine_outputs, join_rows, row_count
from tp_core.errors import StepError


class Pair(NamedTuple):
    left: Any
    right: Any


def rows(indices):
    """Return values with a row for each index, of every kind."""
    numbers = torch.tensor(indices, dtype=torch.float64)
    return {
        "tensor": numbers[:, None].expand(-1, 2),
        "list": [{"index": i, "tensor": torch.full((i + 1,), i)} for i in indices],
        "array": np.array(indices),
        "pair": Pair(numbers, None),
    }


def indices_of(value):
    found = [
        value["tensor"][:, 1].tolist(),
        [entry["index"] for entry in value["list"]],
        [int(entry["tensor"][0]) for entry in value["list"]],
        value["array"].tolist(),
        value["pair"].left.tolist(),
    ]
    assert all(numbers == found[0] for numbers in found)
    assert value["pair"].right is None
    return found[0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_parts_in_any_order_are_joined_in_that_of_the_data(counts, random, shuffled):
    order = list(range(sum(counts)))
    if shuffled:
        random.shuffle(order)
    ends = np.cumsum([0, *counts])
    values = [
        {"loss": torch.tensor(1.0), "rows": SampleRows((rows(order[a:b]),))}
        for a, b in itertools.pairwise(ends)
    ]
    parts = Parts([None] * len(counts), counts=counts, order=order if shuffled else None)
    combined = combine_outputs(values, parts, loss="mean", device=torch.device("cpu"))
    (joined,) = combined["rows"].pieces
    assert indices_of(joined) == list(range(sum(counts)))


@pytest.mark.parametrize("second", [torch.tensor(2.0), 2.0, torch.arange(5.0), "text"])
def test_values_without_a_row_for_each_sample_stay_pieces(second):
    parts = Parts([None, None], counts=[1, 2], order=[1, 0, 2])
    values = [SampleRows((torch.tensor([1.0]),)), SampleRows((second,))]
    combined = combine_outputs([{"rows": v} for v in values], parts, loss="mean", device=torch.device("cpu"))
    assert len(combined["rows"].pieces) == 2
    assert combined["rows"].pieces[1] is second


def test_rows_are_counted():
    assert row_count(rows([3, 1])) == 2
    assert row_count((torch.zeros(3), torch.zeros(2))) is None
    assert row_count(torch.tensor(1)) is None
    assert row_count(None) is None


@pytest.mark.parametrize(
    "values",
    [
        [torch.zeros(2), [1]],
        [torch.tensor(1.0), torch.tensor(2.0)],
        [{"a": [1]}, {"b": [1]}],
        [([1],), ([1], [2])],
        [3, 4],
    ],
)
def test_values_that_do_not_go_together_are_refused(values):
    with pytest.raises(StepError, match="are joined by their rows"):
        join_rows(values)
