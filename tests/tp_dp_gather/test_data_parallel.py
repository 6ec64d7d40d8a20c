"""Splitting, gathering, and the criterion in parallel."""

import copy
import pickle
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tp_core.errors import ConfigError, DeviceError
from tp_dp_gather import DataParallel, data_parallel, scatter, sort_by_device

NAMES = ["mlp", "conv", "lstm", "transformer"]


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def run(function, *args, count=2, **options):
    return DataParallel(Function(function), ["cpu"] * count, **options)(*args)


@dataclass
class ModelOutput(OrderedDict):
    """What transformers' model outputs are: a dataclass and a mapping in one."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        if isinstance(self.logits, dict):
            given, self.logits = self.logits, None
            for key, value in given.items():
                self[key] = value
            return
        for key in ("logits", "hidden"):
            if getattr(self, key) is not None:
                super().__setitem__(key, getattr(self, key))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class Plain:
    logits: Any
    note: str


class Named(NamedTuple):
    logits: Any
    note: str


@pytest.mark.parametrize("count", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_the_module_by_itself(zoo, name, count):
    def forward(model):
        wrapped = DataParallel(model, ["cpu"] * count, gather_to_one_device=False, inputs_are_scattered=True)
        return lambda inputs: wrapped(tuple(inputs))

    zoo.check_equal_training(name, count, forward)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_gathered_output_and_gradients_are_those_of_the_whole_batch(rows):
    model = nn.Linear(5, 2).double()
    x = torch.randn(rows, 5).double()
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    output = DataParallel(model, ["cpu"] * 3)(x)
    torch.testing.assert_close(output, model(x))
    output.square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def test_another_dimension_is_split_and_joined():
    x = torch.randn(3, 8)
    seen = run(lambda x: x * 2, x, dim=1)
    assert torch.equal(seen, x * 2)
    assert [p.shape for p in run(lambda x: x, x, dim=1, gather_to_one_device=False)] == [(3, 4), (3, 4)]


def test_scalars_become_a_vector_without_a_warning():
    assert run(lambda x: x.sum(), torch.ones(3)).tolist() == [2.0, 1.0]


def test_what_is_no_tensor_comes_back_as_a_list_of_parts_and_none_as_none():
    out = run(lambda x: {"name": "a", "n": len(x), "none": None}, torch.ones(3))
    assert out == {"name": ["a", "a"], "n": [2, 1], "none": None}


def test_arguments_without_rows_are_in_every_part():
    out = run(lambda x, scale, options: x * scale * options["k"], torch.ones(4), torch.tensor(2.0), {"k": 3})
    assert out.tolist() == [6.0] * 4


def test_a_call_without_tensors_runs_once():
    assert run(torch.ones, 3).tolist() == [1.0, 1.0, 1.0]


def test_scattered_flags_go_to_every_part():
    wrapped = DataParallel(
        Function(lambda x, flag, k=None: x if flag else k), ["cpu"] * 2, inputs_are_scattered=True
    )
    assert wrapped((torch.ones(1), torch.ones(1)), True, k=None).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"logits": x, "note": "n"},
        lambda x: [{"deep": ({"logits": x},)}],
        lambda x: Plain(x, "n"),
        lambda x: Named(x, "n"),
        lambda x: ModelOutput(logits=x, hidden=x),
        lambda x: {"deep": ModelOutput(logits=x)},
    ],
    ids=["dict", "nested", "dataclass", "namedtuple", "model output", "model output in a dict"],
)
def test_except_keywords_work_at_any_depth_and_types_are_kept(make):
    def find(value):
        if isinstance(value, dict):
            return find(value["logits"] if "logits" in value else value["deep"])
        if isinstance(value, Plain | Named):
            return value.logits
        return value if not isinstance(value, list) else find(value[0]["deep"][0])

    x = torch.randn(3, 2)
    whole, kept = run(make, x), run(make, x, except_keywords=["logits"])
    assert type(whole) is type(kept) is type(make(x))
    assert torch.equal(find(whole), x)
    assert type(find(kept)) is tuple
    assert [p.shape[0] for p in find(kept)] == [2, 1]


def test_a_model_output_keeps_attributes_and_items_alike():
    out = run(lambda x: ModelOutput(logits=x, hidden=x + 1), torch.ones(3, 2), except_keywords="hidden")
    assert out.logits is out["logits"]
    assert [p.shape[0] for p in out.hidden] == [2, 1]


def test_a_key_that_no_output_has_is_told_once_with_the_keys_that_exist():
    wrapped = DataParallel(Function(lambda x: {"out1": x}), ["cpu"] * 2, except_keywords=["ouy1", "out1"])
    with pytest.warns(UserWarning, match="names 'ouy1', and no output has such a key; the keys are: 'out1'"):
        wrapped(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(torch.ones(2))


def test_parts_are_sorted_by_device_where_asked():
    meta, cpu = torch.ones(2, device="meta"), torch.ones(2)
    assert [x.device.type for x in sort_by_device([meta, cpu])] == ["cpu", "meta"]
    x = torch.arange(4.0)
    assert torch.equal(run(lambda x: x, x, sort_and_gather=True), x)


def test_the_functional_form_takes_the_same_options():
    model = nn.Linear(5, 2)
    x = torch.randn(4, 5)
    torch.testing.assert_close(data_parallel(model, x, ["cpu", "cpu"]), model(x))
    parts = data_parallel(model, (x,), ["cpu", "cpu"], gather_to_one_device=False)
    assert [p.shape[0] for p in parts] == [2, 2]
    found = data_parallel(Function(lambda a=None: a), None, ["cpu"] * 2, module_kwargs={"a": x})
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: run(lambda x, y: x, torch.ones(2), torch.ones(3)),
            "same number of rows along dim 0, got 2 and 3",
        ),
        (lambda: run(len, torch.ones(2), inputs_are_scattered=True), "argument 0 must be a tuple or list"),
        (lambda: run(len, [1] * 3, inputs_are_scattered=True), "argument 0 must have 1 to 2 parts, .* got 3"),
        (lambda: run(lambda x, y: x, [1, 2], [1], inputs_are_scattered=True), "must have 2 parts .* got 1"),
        (
            lambda: run(lambda x: [x] * (len(x) + 1), torch.ones(3)),
            "a list of 3 in part 0 and a list of 2 in part 1",
        ),
        (
            lambda: run(lambda x: x if len(x) > 1 else 3, torch.ones(3)),
            "is a Tensor in part 0 and a int in part 1",
        ),
        (lambda: run(len, 1, dim=-1), "dim must be at least 0, got -1"),
        (lambda: run(len, 1, gather_to_one_device=False, except_keywords="k"), "give one of the two"),
    ],
)
def test_what_cannot_be_split_or_gathered_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_devices_that_do_not_exist_are_refused():
    for options in ({"device_ids": ["cuda:9"]}, {"device_ids": ["cpu"], "output_device": "cuda:9"}):
        with pytest.raises(DeviceError):
            DataParallel(nn.Identity(), **options)


def test_an_error_in_one_part_leaves_the_wrapper_usable():
    def fail(x):
        if x[0] == 2:
            raise LookupError("no good")
        return x

    wrapped = DataParallel(Function(fail), ["cpu"] * 2)
    with pytest.raises(LookupError, match="no good") as caught:
        wrapped(torch.arange(4.0))
    assert caught.value.__notes__ == ["in part 1 of 2, on device cpu"]
    assert wrapped(torch.ones(2)).tolist() == [1.0, 1.0]


def test_copies_and_pickles_and_replaced_modules():
    wrapped = DataParallel(nn.Linear(3, 2), ["cpu"] * 2)
    x = torch.ones(3, 3)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        torch.testing.assert_close(other(x), wrapped(x))
    wrapped.module = nn.Linear(3, 4)
    wrapped.refresh()
    assert wrapped(x).shape == (3, 4)


nested = st.recursive(
    st.just("tensor") | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(nested, st.just(1) | st.integers(12, 17))  # lists are shorter than parts
def test_nested_outputs_of_any_shape_are_gathered(shape, rows):
    def build(value, tensor, integer):
        if isinstance(value, dict):
            return {k: build(v, tensor, integer) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(build(v, tensor, integer) for v in value)
        return tensor if value == "tensor" else integer(value)

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list | tuple):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        return a == b

    x = torch.arange(float(rows))
    found = run(lambda x: build(shape, x, int), x, count=3)
    assert same(found, build(shape, x, lambda n: [n] * min(3, rows)))


@pytest.mark.parametrize("devices", ["cpu,cpu", ["cpu", torch.device("cpu")], ("cpu", "cpu:0")])
def test_devices_are_written_as_everywhere(devices):
    net = DataParallel(nn.Linear(5, 2), devices, gather_to_one_device=False)
    assert net.device_ids == [torch.device("cpu")] * 2
    assert [len(part) for part in scatter(torch.ones(5, 2), devices)] == [3, 2]


class Halving(nn.Module):
    """Changes its input in place, and then saves it for the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x.mul_(0.5))


def test_a_module_may_change_its_input_in_place():
    torch.manual_seed(0)
    net, x = Halving(), torch.randn(7, 3)
    changed = [x.clone(), x.clone()]
    expected = net(changed[0])
    expected.square().mean().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    found = DataParallel(net, ["cpu", "cpu", "cpu"])(changed[1])
    found.square().mean().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in net.parameters()], gradients)
    assert torch.equal(*changed)  # the batch as well, as on one device


def test_items_of_the_module_are_its_own():
    parts = nn.ModuleDict({"body": nn.Linear(3, 2)})
    assert DataParallel(parts, ["cpu", "cpu"])["body"] is parts["body"]
    with pytest.raises(TypeError, match="not subscriptable"):
        DataParallel(nn.Linear(3, 2), ["cpu", "cpu"])[0]
