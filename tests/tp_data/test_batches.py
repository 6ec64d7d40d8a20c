"""Batches of a fixed size: what is in the last one, and which rank has what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_core.errors import ConfigError
from tp_data import BatchSize, Item


def batches(batcher, samples):
    """Return the positions and weights of all batches of so many samples."""
    items, found = map(Item, range(samples)), []
    while (rows := batcher.next_batch(items)) is not None:
        found.append([(row.pieces[0].position, row.weight) for row in rows])
    return found


def test_the_last_samples_are_spread_dropped_or_filled_up():
    assert [len(batch) for batch in batches(BatchSize(4), 10)] == [4, 4, 2]
    assert [len(batch) for batch in batches(BatchSize(4, last="drop"), 10)] == [4, 4]
    assert batches(BatchSize(4, last="pad"), 10)[-1] == [(8, 1.0), (9, 1.0), (8, 0.0), (9, 0.0)]


@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from(["spread", "drop", "pad"]))
def test_the_length_is_the_number_of_batches(samples, size, last):
    batcher = BatchSize(size, last=last)
    assert batcher.length(samples) == len(batches(batcher, samples))


@given(st.integers(1, 30), st.integers(1, 9))
def test_the_parts_of_the_ranks_are_the_batch(size, ranks):
    batcher = BatchSize(size)
    rows = batcher.next_batch(map(Item, range(size)))
    parts = batcher.split(rows, ranks)
    assert len(parts) == ranks
    assert [row for part in parts for row in part] == rows


def test_a_filled_batch_has_a_weight_for_each_row():
    batcher = BatchSize(4, last="pad")
    rows = batcher.next_batch(map(Item, range(3)))
    batch = batcher.collate(rows, {n: {"x": torch.tensor(n)} for n in range(3)})
    assert batch["x"].tolist() == [0, 1, 2, 0]
    assert batch["weight"].tolist() == [1, 1, 1, 0]
    with pytest.raises(ConfigError, match="a batch must be a dict, got Tensor; return dicts"):
        batcher.collate(rows, dict.fromkeys(range(3), 1.0))


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_a_size_is_a_number_above_zero(size):
    with pytest.raises(ConfigError, match="a batch needs a number of samples above 0"):
        BatchSize(size)


def test_an_unknown_end_is_refused():
    with pytest.raises(ConfigError, match="last='keep': the last samples of an epoch can be 'spread'"):
        BatchSize(4, last="keep")
