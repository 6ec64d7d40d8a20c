"""Packed sequences are one value, parts that are dicts are joined, a part without samples is explained."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from tp_core.errors import ConfigError
from tp_tuple import TupleParallel, cat, tp_collate

from tests.installed import adapter_class

TupleCollateAdapter = adapter_class("tuple")


def packed(items):
    return pack_sequence(items, enforce_sorted=False)


SEQUENCES = [torch.arange(float(n))[:, None] for n in (2, 3, 1, 4)]


def test_packed_sequences_are_collated_run_and_joined_as_one_value():
    parts = tp_collate(2)(packed)(SEQUENCES)
    assert [len(unpack_sequence(part)) for part in parts] == [2, 2]
    rnn = nn.GRU(1, 2)
    found = TupleParallel(rnn, ["cpu", "cpu"], transfer_output=True, reduction=lambda values: cat(values[0]))(
        parts
    )
    expected = rnn(packed(SEQUENCES))[0]
    for a, b in zip(unpack_sequence(found), unpack_sequence(expected), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(
        ConfigError, match=r"must be a tuple or list with one part per device, got PackedSequence"
    ):
        TupleParallel(rnn, ["cpu", "cpu"])(packed(SEQUENCES))


@dataclass
class Output:
    logits: Tensor
    name: str


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda n: {"y": torch.ones(n), "name": "a"}, lambda value: (value["y"], value["name"])),
        (lambda n: Output(torch.ones(n), "a"), lambda value: (value.logits, value.name)),
    ],
    ids=["dict", "dataclass"],
)
def test_parts_that_are_dicts_are_joined_by_key(make, read):
    rows, names = read(cat((make(2), make(1))))
    assert rows.tolist() == [1, 1, 1]
    assert names == ("a", "a")


def test_dicts_of_other_keys_come_as_they_are():
    parts = {"a": torch.ones(1)}, {"b": torch.ones(1)}
    assert cat(parts) is parts


@pytest.mark.parametrize("adapt", [tp_collate(2), lambda f: TupleCollateAdapter().adapt(f, parts=2)])
def test_a_collate_function_that_leaves_a_part_out_says_so(adapt):
    collate = adapt(lambda items: torch.stack([item for item in items if item.sum() < 4]))
    with pytest.raises(RuntimeError, match="non-empty") as caught:
        collate([torch.full((2,), float(i)) for i in range(4)])
    assert "2 of the 4 samples of a batch" in caught.value.__notes__[-1]
    assert "in the dataset or the sampler" in caught.value.__notes__[-1]
