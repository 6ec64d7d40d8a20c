"""TupleParallel computes what the module by itself computes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tp_tuple import TupleParallel, cat

NAMES = ["mlp", "conv", "lstm", "transformer", "graphs"]


@pytest.mark.parametrize("count", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_the_module_by_itself(zoo, name, count):
    def forward(model):
        wrapped = TupleParallel(model, ["cpu"] * count)
        return lambda inputs: wrapped(tuple(inputs))

    zoo.check_equal_training(name, count, forward)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_whole_batch_in_parts_and_concatenated_is_the_whole_batch(count):
    model = nn.Linear(3, 2)
    x = torch.randn(7, 3)
    wrapped = TupleParallel(model, ["cpu"] * 3, transfer_output=True, reduction=cat)
    torch.testing.assert_close(wrapped(x.chunk(count)), model(x))


leaves = st.integers(0, 5).map(lambda n: torch.full((2,), float(n))) | st.integers() | st.text(max_size=3)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return {"args": args, "kwargs": kwargs}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(st.lists(st.tuples(nested, nested), min_size=1, max_size=3))
def test_nested_inputs_and_outputs_of_any_shape_pass_through(parts):
    wrapped = TupleParallel(ECHO, ["cpu"] * 3)
    outputs = wrapped(tuple(a for a, _ in parts), name=[b for _, b in parts])
    assert isinstance(outputs, tuple)
    for output, (a, b) in zip(outputs, parts, strict=True):
        assert same(output, {"args": (a,), "kwargs": {"name": b}})


ECHO = Echo()
