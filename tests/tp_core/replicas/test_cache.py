"""Copies are made when something changed, and only then."""

import copy
import gc
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from tp_core.errors import ConfigError, DeviceError, ModelError
from tp_core.replicas import Replicas
from tp_core.replicas._mirror import ParameterMirror


def call(replica, part):
    return replica(part)


def copied(replicas):
    return sum(mirror.copied for mirror in replicas._cache.mirrors)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = [torch.ones(2, 3), torch.full((1, 3), 2.0)]


def test_forwards_without_a_change_copy_once(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    for _ in range(4):
        replicas.run(call, X)
    with torch.no_grad():
        replicas.run(call, X)
    assert copied(replicas) == 4


def test_only_the_parameters_that_changed_are_copied_again(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(call, X)
    with torch.no_grad():
        model[2].bias.add_(1)
    assert torch.equal(replicas.run(call, X)[1], model(X[1]))
    assert copied(replicas) == 5


def test_replicas_on_the_modules_own_device_share_its_parameters(model):
    replicas = Replicas(model, ["cpu", "cpu", "cpu"])
    seen = replicas.run(lambda replica, _: list(replica.parameters()), [0, 1, 2])
    for parameters in seen:
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert replicas._cache.mirrors == ()


def test_copies_lie_elsewhere_and_appear_as_parameters(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    seen = replicas.run(lambda r, _: [p.data_ptr() for p in r.parameters()], [0, 1])
    assert len(seen[1]) == 4
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.Adam(p, 0.1, fused=True),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.Adagrad(p, 0.1, foreach=False),
    ],
    ids=["fused SGD", "fused Adam", "foreach AdamW", "plain Adagrad"],
)
def test_a_step_of_an_optimizer_is_seen(model, make):
    optimizer = make(model.parameters())
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = replicas.run(call, X)
        torch.testing.assert_close(outputs[1], model(X[1]))
        sum(y.sum() for y in outputs).backward()
        optimizer.step()


def test_refresh_copies_all(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(call, X)
    replicas.refresh()
    assert torch.equal(replicas.run(call, X)[1], model(X[1]))
    assert copied(replicas) == 8


@pytest.mark.parametrize("force_copies", [False, True])
def test_refresh_reaches_replicas_that_take_part_later(force_copies):
    model = nn.BatchNorm1d(2, affine=force_copies).eval()
    replicas = Replicas(model, ["cpu"] * 3, force_copies=force_copies)
    parts = [torch.ones(2, 2)] * 3
    replicas.run(call, parts)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.add_(1)
    replicas.refresh()
    replicas.run(call, parts[:2])
    assert torch.equal(replicas.run(call, parts)[2], model(parts[2]))


def test_a_parameter_that_was_replaced_is_the_one_that_is_used_and_trained(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(call, X)
    model[0].weight = nn.Parameter(torch.full((4, 3), 0.5))
    outputs = replicas.run(call, X)
    assert torch.equal(outputs[1], model(X[1]))
    outputs[1].sum().backward()
    assert model[0].weight.grad is not None


def test_a_submodule_that_was_replaced_is_the_one_that_is_used(model):
    for force_copies in (False, True):
        replicas = Replicas(model, ["cpu", "cpu"], force_copies=force_copies)
        replicas.run(call, X)
        model[2] = nn.Linear(4, 5)
        assert torch.equal(replicas.run(call, X)[1], model(X[1]))


def test_another_dtype_reaches_the_copies(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(call, X)
    model.double()
    outputs = replicas.run(call, [x.double() for x in X])
    assert torch.equal(outputs[1], model(X[1].double()))


def test_freezing_between_calls_is_followed(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(call, X)
    model[0].requires_grad_(False)
    sum(y.sum() for y in replicas.run(call, X)).backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    model.requires_grad_(False)
    assert not any(y.requires_grad for y in replicas.run(call, X))


def test_a_graph_from_before_a_change_refuses_backward_as_on_one_device(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    outputs = replicas.run(call, X)
    with torch.no_grad():
        model[2].weight.mul_(2)
    replicas.run(call, X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[1].sum().backward()


def test_backward_of_two_forwards_after_both(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    first, second = replicas.run(call, X), replicas.run(call, X)
    sum(y.sum() for y in first).backward()
    once = [p.grad.clone() for p in model.parameters()]
    sum(y.sum() for y in second).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [2 * g for g in once])


def test_what_a_replica_writes_into_its_weights_is_put_right_at_the_next_call(model):
    def spoil(replica, part):
        with torch.no_grad():
            if part == 1:
                replica[0].weight.zero_()

    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    replicas.run(spoil, [0, 1])
    assert torch.equal(replicas.run(call, X)[1], model(X[1]))


def test_fewer_parts_than_devices_use_the_first_ones(model):
    replicas = Replicas(model, ["cpu"] * 4)
    assert [y.shape[0] for y in replicas.run(call, X)] == [2, 1]
    assert len(replicas) == 4


def test_a_part_alone_runs_on_the_module_or_what_is_given_instead(model):
    replicas, other = Replicas(model, ["cpu"] * 2), copy.deepcopy(model)
    assert replicas.run_alone(lambda module, part: (module, part), 5) == (model, 5)
    assert replicas.run_alone(lambda module, _: module, 5, module=other) is other


@pytest.mark.parametrize("count", [0, 3])
def test_a_wrong_number_of_parts_is_refused(model, count):
    with pytest.raises(ConfigError, match=f"expected 1 to 2 parts, one per device, got {count}"):
        Replicas(model, ["cpu", "cpu"]).run(call, [X[0]] * count)


def test_devices_that_do_not_exist_are_refused(model):
    for devices in ([], ["cuda:77"], ["nonsense"]):
        with pytest.raises(DeviceError):
            Replicas(model, devices)


def test_a_module_elsewhere_is_refused():
    replicas = Replicas(nn.Linear(2, 2, device="meta"), ["cpu", "cpu"])
    with pytest.raises(ModelError, match="first device cpu, but 'weight' is on meta"):
        replicas.run(call, X)


def test_a_lazy_module_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch call lazy modules experimental
        lazy = nn.LazyLinear(2)
    with pytest.raises(ModelError, match="'weight' has no shape yet"):
        Replicas(lazy, ["cpu", "cpu"]).run(call, X)


def test_a_shard_is_refused(model):
    model[0].weight.tp_sharded = True
    with pytest.raises(ModelError, match=r"'0.weight' is one rank's shard"):
        Replicas(model, ["cpu", "cpu"]).run(call, X)


class Packed(torch.Tensor):
    """Integers and scales in one tensor, as torchao has them: nothing makes an empty one."""

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    def __tensor_flatten__(self):
        return ["values", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        assert "detach" in str(operator), operator
        return cls(args[0].values, args[0].scales)


class Adapted(nn.Module):
    adapter_layer_names = ("up",)  # as peft's layers have

    def __init__(self):
        super().__init__()
        packed = Packed(torch.ones(4, 3, dtype=torch.int8), torch.full((4, 1), 0.5))
        self.weight, self.up = nn.Parameter(packed, requires_grad=False), nn.Linear(3, 4)

    def forward(self, x):
        return x @ (self.weight.values * self.weight.scales).T + self.up(x)


def test_replicas_with_adapters_share_a_quantized_base_on_their_device():
    model = Adapted()
    replicas = Replicas(model, ["cpu", "cpu"])
    for _ in range(2):
        outputs = replicas.run(call, X)
        assert torch.equal(outputs[1], model(X[1]))
    assert copied(replicas) == 2
    outputs[1].sum().backward()
    assert torch.equal(model.up.bias.grad, torch.ones(4))
    with pytest.raises(ModelError, match=r"a quantized weight \(Packed\) cannot be copied to meta"):
        ParameterMirror(torch.device("meta")).follow([model.weight])


def test_dropping_the_replicas_frees_copies_and_threads(model):
    before = threading.active_count()
    replicas = Replicas(model, ["cpu"] * 3, force_copies=True)
    sum(y.sum() for y in replicas.run(call, X)).backward()
    reference = weakref.ref(replicas._cache.mirrors[0].copies[0])
    gc.collect()
    gc.disable()
    try:
        del replicas
        assert reference() is None  # at once, and not when the collector comes by
    finally:
        gc.enable()
    deadline = time.monotonic() + 800
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_deep_copy_has_a_module_and_copies_of_its_own(model):
    replicas = Replicas(model, ["cpu", "cpu"], force_copies=True)
    twin = copy.deepcopy(replicas)
    with torch.no_grad():
        model[0].weight.zero_()
    assert twin.module is not model
    assert torch.equal(twin.run(call, X)[1], twin.module(X[1]))
