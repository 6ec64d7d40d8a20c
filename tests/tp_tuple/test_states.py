"""Names in states, parameters and checkpoints of the wrapper are those of the module."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tp_core.errors import ConfigError
from tp_tuple import TupleParallel

D = ["cpu", "cpu"]
X = (torch.ones(2, 3), torch.full((1, 3), 2.0))


class Versioned(nn.Module):
    """A module that changes old states, as torch's own do."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = []

    def _load_from_state_dict(self, state, prefix, local_metadata, *args):
        self.seen.append(local_metadata.get("version"))
        super()._load_from_state_dict(state, prefix, local_metadata, *args)


def make():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_every_look_at_names_gives_the_modules_own():
    module = make()
    wrapped = TupleParallel(module, D)
    assert list(wrapped.state_dict()) == list(module.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert [n for n, _ in wrapped.named_buffers()] == [n for n, _ in module.named_buffers()]
    assert list(wrapped.modules()) == [wrapped, *module.modules()]
    outer = nn.Sequential(wrapped, nn.Linear(2, 1))
    assert [n for n, _ in outer.named_parameters()] == [
        n for n in outer.state_dict() if "weight" in n or "bias" in n
    ]
    assert outer.get_parameter("0.0.weight") is module[0].weight


def test_hooks_of_the_wrapper_run():
    wrapped = TupleParallel(make(), D)
    calls = []
    wrapped.register_state_dict_pre_hook(lambda *_: calls.append("before"))
    wrapped.register_state_dict_post_hook(lambda _, state, prefix, __: calls.append(next(iter(state))))
    wrapped.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    wrapped.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    wrapped.load_state_dict(wrapped.state_dict())
    assert calls == ["before", "0.weight", "load", "loaded"]


def test_missing_and_unexpected_names_are_reported_as_they_are_written():
    wrapped = TupleParallel(make(), D)
    state = wrapped.state_dict()
    del state["0.bias"]
    found = wrapped.load_state_dict({**state, "more": torch.ones(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["more"])
    outer = nn.Sequential(wrapped)
    found = outer.load_state_dict({f"0.{k}": v for k, v in state.items()}, strict=False)
    assert found.missing_keys == ["0.0.bias"]


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["itself", "inside"])
def test_versions_of_states_are_not_lost(wrap):
    inner = Versioned()
    model = wrap(TupleParallel(inner, D))
    model.load_state_dict(model.state_dict())
    assert inner.seen == [3]


def test_versions_of_the_modules_own_state_are_not_lost():
    inner = nn.Sequential(Versioned())
    TupleParallel(inner, D).load_state_dict(inner.state_dict())
    assert inner[0].seen == [3]


def test_a_child_called_module_is_not_taken_for_a_prefix():
    class Both(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), value))
            self.module = nn.Module()
            self.module.weight = nn.Parameter(torch.full((1,), 10 * value))

    source, target = Both(1.0), Both(2.0)
    TupleParallel(target, D).load_state_dict(TupleParallel(source, D).state_dict())
    assert (target.weight.item(), target.module.weight.item()) == (1.0, 10.0)
    wrapped_names = {f"module.{k}": v for k, v in Both(3.0).state_dict().items()}
    TupleParallel(target, D).load_state_dict(wrapped_names)
    assert (target.weight.item(), target.module.weight.item()) == (3.0, 30.0)


@pytest.mark.parametrize("inside", [False, True])
def test_distributed_checkpoints_name_model_and_optimizer_alike(inside):
    module = make()
    wrapped = TupleParallel(module, D)
    model = nn.Sequential(wrapped) if inside else wrapped
    optimizer = torch.optim.Adam(model.parameters())
    torch.stack([y.sum() for y in wrapped((torch.randn(2, 3), torch.randn(2, 3)))]).sum().backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    names = [f"0.{n}" if inside else n for n, _ in module.named_parameters()]
    assert set(names) <= set(state)
    assert optimizer_state["param_groups"][0]["params"] == names
    assert set(optimizer_state["state"]) == set(names)
    expected, again = copy.deepcopy(state), copy.deepcopy(state)
    with torch.no_grad():
        module[0].weight.zero_()
    set_state_dict(model, optimizer, model_state_dict=again, optim_state_dict=optimizer_state)
    torch.testing.assert_close(dict(model.state_dict()), expected)


@pytest.mark.parametrize("name", ["scatter", "gather"])
def test_steps_that_never_happen_say_so(name):
    with pytest.raises(ConfigError, match=f"Mine.{name} would never be called"):
        type("Mine", (TupleParallel,), {name: lambda *_: None})


def test_overridden_steps_are_honored():
    class Mine(TupleParallel):
        def replicate(self, module, device_ids):
            replicas = super().replicate(module, device_ids)
            for i, replica in enumerate(replicas):
                replica.number = i
            return replicas

        def parallel_apply(self, replicas, inputs, kwargs):
            return [
                r.number + y
                for r, y in zip(replicas, super().parallel_apply(replicas, inputs, kwargs), strict=True)
            ]

    model = nn.Linear(3, 1)
    first, second = Mine(model, D)(X)
    torch.testing.assert_close([first, second], [model(X[0]), model(X[1]) + 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transfer_data": False}, r"option transfer_data=False \(pass transfer_input="),
        ({"parallel_transfer": True}, "pass transfer_input=; the parts are transferred in parallel"),
        ({"custom_parallel_apply": True}, "leave it out"),
        ({"nonsense": 1}, r"TupleParallel does not have the option nonsense=1 \(unknown\)"),
        ({"reduction": True}, "reduction must be a function of the outputs, got True"),
    ],
)
def test_options_of_other_versions_are_refused_with_what_to_say_instead(options, message):
    with pytest.raises(ConfigError, match=message):
        TupleParallel(make(), D, **options)
