"""The wrapper's arguments, outputs, attributes and state."""

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError, DeviceError, TransferError
from tp_tuple import TupleParallel, cat, recursive_cuda

X = (torch.ones(2, 3), torch.full((1, 3), 2.0))


class Pair(NamedTuple):
    y: Any
    z: Any


class Several(nn.Module):
    def __init__(self, make=lambda x: (x, x * 2)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.make = make

    def forward(self, x):
        return self.make(x * self.weight)


def wrap(module, count=2, **kwargs):
    return TupleParallel(module, ["cpu"] * count, **kwargs)


def test_one_output_is_a_tuple_with_an_entry_per_device():
    y = wrap(nn.Linear(3, 4))(X)
    assert type(y) is tuple
    assert [tuple(p.shape) for p in y] == [(2, 4), (1, 4)]


def test_several_outputs_are_a_tuple_for_each():
    y, z = wrap(Several())(X)
    assert [len(y), len(z)] == [2, 2]
    assert torch.equal(z[1], X[1] * 2)


def test_named_outputs_keep_their_names():
    out = wrap(Several(lambda x: Pair(x, x + 1)))(X)
    assert type(out) is Pair
    assert torch.equal(out.z[0], X[0] + 1)


def test_a_dict_is_one_output_per_device():
    out = wrap(Several(lambda x: {"x": x}))(X)
    assert [sorted(o) for o in out] == [["x"], ["x"]]


def test_unequal_numbers_of_outputs_are_refused():
    with pytest.raises(ConfigError, match=r"same number of values, got \[2, 1\]"):
        wrap(Several(tuple))(X)


def test_fewer_parts_than_devices_use_the_first():
    assert len(wrap(nn.Linear(3, 2), 4)(X[:1])) == 1
    assert len(wrap(nn.Linear(3, 2), 4)(X)) == 2


def test_lists_are_as_good_as_tuples():
    assert len(wrap(nn.Linear(3, 2))(list(X))) == 2


def test_a_call_without_arguments_runs_the_first_device():
    class Constant(nn.Module):
        def forward(self):
            return 7

    assert wrap(Constant())() == (7,)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (X[0],),
            {},
            "argument 0 must be a tuple or list with one part per device, got Tensor of shape .*tp_collate",
        ),
        ((X, 5), {}, "argument 1 must be a tuple or list .* got int: 5"),
        ((X,), {"mask": "ab"}, "argument 'mask' must be a tuple or list .* got str"),
        ((X * 2,), {}, "argument 0 must have 1 to 2 parts, one per device, got 4"),
        (((),), {}, "argument 0 must have 1 to 2 parts, one per device, got 0"),
        ((X,), {"mask": X[:1]}, "argument 'mask' must have 2 parts like the arguments before it, got 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args, kwargs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        wrap(nn.Linear(3, 2))(*args, **kwargs)
    assert isinstance(caught.value, ValueError)


def test_reduction_is_applied_last_and_cat_takes_dim():
    model = nn.Linear(3, 2)
    joined = wrap(model, transfer_output=True, reduction=cat)(X)
    torch.testing.assert_close(joined, model(torch.cat(X)))
    side = wrap(model, reduction=cat, dim=1)((X[0], X[0]))
    assert side.shape == (2, 4)
    assert wrap(model, reduction=len)(X) == 2


def test_cat_joins_each_of_several_outputs():
    y, z = wrap(Several(lambda x: (x, x.sum())), reduction=cat)(X)
    assert y.shape == (3, 3)
    assert z.tolist() == [6.0, 6.0]


def test_cat_leaves_what_is_no_tensor():
    assert cat((("a", "b"), X))[0] == ("a", "b")
    pair = cat(Pair(X, X))
    assert type(pair) is Pair
    assert pair.y.shape == (3, 3)


def test_output_device_is_where_outputs_go():
    out = wrap(nn.Linear(3, 2), output_device="cpu")(X)
    assert [p.device.type for p in out] == ["cpu", "cpu"]


def test_inputs_stay_where_they_are_without_transfer():
    class Stubborn:
        def to(self, *args, **kwargs):
            raise AssertionError("moved")

    seen = wrap(Several(lambda x: x), transfer_input=True)
    with pytest.raises(AssertionError, match="moved"):
        seen((Stubborn(), Stubborn()))

    class Takes(nn.Module):
        def forward(self, x):
            return type(x).__name__

    assert wrap(Takes(), transfer_input=False)((Stubborn(), Stubborn())) == ("Stubborn", "Stubborn")


def test_custom_types_move_through_their_own_methods():
    class Graph:
        moved = None

        def to(self, device, non_blocking=None):
            other = Graph()
            other.moved = (str(device), non_blocking)
            return other

    class Takes(nn.Module):
        def forward(self, graph):
            return {"moved": graph.moved}

    out = wrap(Takes())((Graph(), Graph()))
    assert [o["moved"][0] for o in out] == ["cpu", "cpu"]


def test_a_to_that_returns_none_is_refused_with_part_and_device():
    class Graph:
        def __init__(self, good):
            self.good = good

        def to(self, device):
            return self if self.good else None

    wrapped = wrap(nn.Identity())
    with pytest.raises(TransferError, match="to returned None") as caught:
        wrapped((Graph(True), Graph(False)))
    assert "in part 1 of 2, on device cpu" in caught.value.__notes__
    assert len(wrapped(X)) == 2


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(DeviceError):
        TupleParallel(nn.Linear(3, 2), ["cuda:9"])
    with pytest.raises(DeviceError):
        TupleParallel(nn.Linear(3, 2), ["cpu"], output_device="cuda:9")


def test_attributes_fall_through_to_the_module():
    wrapped = wrap(Several())
    wrapped.module.note = "hello"
    assert wrapped.note == "hello"
    assert wrapped.weight is wrapped.module.weight
    with pytest.raises(AttributeError, match="'Several' object has no attribute 'nothing'"):
        _ = wrapped.nothing


def test_it_counts_as_torch_data_parallel_for_code_that_unwraps():
    assert isinstance(wrap(nn.Linear(3, 2)), nn.DataParallel)


def test_state_has_the_modules_own_keys():
    model = nn.Linear(3, 2)
    assert list(wrap(model).state_dict()) == ["weight", "bias"]
    outer = nn.Sequential(wrap(model), nn.Linear(2, 1))
    assert list(outer.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_state_loads_with_and_without_module_in_front(prefix):
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapped = wrap(model)
    state = {prefix + k: v for k, v in source.state_dict().items()}
    wrapped.load_state_dict(state)
    assert torch.equal(model.weight, source.weight)
    outer = nn.Sequential(wrap(nn.Linear(3, 2)))
    outer.load_state_dict({"0." + k: v for k, v in state.items()})
    assert torch.equal(outer[0].module.weight, source.weight)
    with pytest.raises(RuntimeError, match="nonsense"):
        outer.load_state_dict({"0.nonsense": source.weight, **{"0." + k: v for k, v in state.items()}})


def test_a_module_whose_child_is_called_module_loads_its_own_keys():
    source = nn.Module()
    source.module = nn.Linear(3, 2)
    target = copy.deepcopy(source)
    with torch.no_grad():
        source.module.weight.zero_()
    wrap(target).load_state_dict(wrap(source).state_dict())
    assert target.module.weight.sum() == 0


def test_a_module_that_was_replaced_is_the_one_that_runs():
    wrapped = wrap(nn.Linear(3, 2))
    wrapped(X)
    wrapped.module = nn.Linear(3, 5)
    assert wrapped(X)[1].shape == (1, 5)


def test_copies_and_pickles_stand_by_themselves():
    wrapped = wrap(nn.Linear(3, 2))
    expected = wrapped(X)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        with torch.no_grad():
            wrapped.module.weight.add_(1)
        torch.testing.assert_close(other(X), expected)
        with torch.no_grad():
            wrapped.module.weight.sub_(1)


@pytest.mark.parametrize("rows", [(2, 2), (2, 1), (1, 0)])
def test_a_list_with_a_dict_for_each_image_is_one_value(rows):
    model = Several(lambda x: [{"box": row, "name": "a"} for row in x])
    parts = tuple(torch.ones(n, 3) * n for n in rows)
    outputs = TupleParallel(model, ["cpu", "cpu"])(parts)
    assert [len(output) for output in outputs] == list(rows)
    joined = TupleParallel(model, ["cpu", "cpu"], transfer_output=True, reduction=cat)(parts)
    torch.testing.assert_close(torch.stack([each["box"] for each in joined]), torch.cat(parts))


def test_refresh_follows_changes_through_data():
    wrapped = wrap(nn.Linear(3, 2))
    wrapped.module.weight.data.zero_()
    wrapped.refresh()
    assert torch.equal(wrapped(X)[1][0], wrapped.module.bias)


def test_an_error_in_one_part_leaves_the_wrapper_usable():
    wrapped = wrap(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        wrapped((X[0], torch.ones(1, 5)))
    assert caught.value.__notes__ == ["in part 1 of 2, on device cpu"]
    assert len(wrapped(X)) == 2


def test_recursive_cuda_without_a_device_says_that_there_is_none():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(DeviceError, match="no device was named, and there is no accelerator here"):
        recursive_cuda(X)
