"""Clipping, loss scaling and parameter groups of a split model equal the whole one's."""

import copy
import math

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import device_types
from tp_core.errors import ConfigError, DisagreementError, NonFiniteLossError

from tests.tp_shard.on_each_rank import Net, PlainNet

d = ts.distributed


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def clipping_uses_the_norm_of_the_whole_gradient():
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        torch.manual_seed(2)
        net, plain = Net().double(), PlainNet().double()
        plain.load_state_dict(ts.collect_state_dict(net, net.state_dict()))
        x = torch.randn(4, 6).double()
        for model in (net, plain):
            model(x).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
        close(ts.clip_grad_norm_(net.parameters(), 0.3, norm_type), expected)
        found = ts.collect_state_dict(net, {n: p.grad for n, p in net.named_parameters()})
        for name, parameter in plain.named_parameters():
            close(found[name], parameter.grad)
    assert ts.clip_grad_norm_(net.stem.weight, 1.0).dim() == 0
    by_hand = nn.Parameter(torch.ones(2))  # a mark set by its name alone
    setattr(by_hand, ts._PARALLEL_DIM, -1)
    by_hand.grad = torch.ones(2)
    assert math.isclose(
        ts.clip_grad_norm_(by_hand, 9.0).item(), math.sqrt(2 * d.get_world_size()), rel_tol=1e-6
    )
    # One rank's shard overflows: all of them know.
    if d.get_rank() == d.get_world_size() - 1:
        net.up.weight.grad[0, 0] = math.inf
    with pytest.raises(NonFiniteLossError, match=r"norm of order 2.0 .* is inf"):
        ts.clip_grad_norm_(net, 1.0, error_if_nonfinite=True)


def a_scaler_leaves_the_step_out_on_all_ranks_or_on_none():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = ts.GradScaler("cpu", init_scale=4.0)
    for overflows in (True, False):
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 6)).square().mean()).backward()
        if overflows and d.get_rank() == d.get_world_size() - 1:
            net.up.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        stayed = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert stayed == overflows
        assert scaler.get_scale() == 2.0


def parameters_come_in_groups():
    net = Net()
    net.stem.bias.requires_grad_(False)
    split = d.get_world_size() > 1
    groups = {g["name"]: g for g in ts.parameter_groups(net, weight_decay=0.1)}
    everything = [p for g in groups.values() for p in g["params"]]
    assert {id(p) for p in everything} == {id(p) for p in net.parameters() if p.requires_grad}
    assert len(groups) == (4 if split else 2)
    assert all(g["weight_decay"] == (0.1 if n.endswith("decayed") else 0.0) for n, g in groups.items())
    torch.optim.AdamW(ts.parameter_groups(net))


CHECKS = [
    clipping_uses_the_norm_of_the_whole_gradient,
    a_scaler_leaves_the_step_out_on_all_ranks_or_on_none,
    parameters_come_in_groups,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_without_a_process_group(check):
    check()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


def trained():
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(4, 6)).square().sum().backward()
    return net


def gradients_that_differ_between_ranks_are_named():
    model = trained()
    ts.check_gradients(model)
    rank = ts.distributed.get_rank()
    for change in (lambda g: g.mul_(1 + rank), lambda g: g.copy_(g.flip(0) if rank else g)):
        other = copy.deepcopy(model)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        change(other.stem.weight.grad)
        with pytest.raises(DisagreementError, match=r"ranks 0 and 1 .* gradients of stem.weight"):
            ts.check_gradients(other)
        with ts.distributed.debug(), pytest.raises(DisagreementError, match=r"stem.weight"):
            ts.clip_grad_norm_(other, 1.0)
        ts.clip_grad_norm_(other, 1.0)
    if rank:
        model.stem.bias.grad = None
    with pytest.raises(DisagreementError, match=r"stem.bias \(norm .* and none\)"):
        ts.check_gradients(model)


def random_numbers_that_differ_between_ranks_are_named_as_the_reason():
    layer = nn.Linear(4, 4)
    torch.manual_seed(ts.distributed.get_rank())
    nn.functional.dropout(layer(torch.ones(2, 4))).sum().backward()
    with pytest.raises(DisagreementError, match=r"random numbers differ.*one seed with torch.manual_seed"):
        ts.check_gradients(layer)


def gradients_that_differ_by_rounding_alone_pass():
    model = trained()
    for p in model.parameters():
        p.grad *= 1 + 1e-5 * ts.distributed.get_rank()
    ts.check_gradients(model)
    model.stem.weight.grad.fill_(float("inf"))  # for whoever looks at such numbers
    ts.check_gradients(model)


def gradients_that_are_dtensors_are_clipped_by_the_norm_of_the_whole():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    for placement in (Shard(0), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [placement]))
        parameter.grad = distribute_tensor(whole.clone(), mesh, [placement])
        torch.testing.assert_close(ts.clip_grad_norm_(parameter, 1.0), whole.norm())
        torch.testing.assert_close(parameter.grad.full_tensor(), whole / whole.norm())
    parameter.grad = DTensor.from_local(whole, mesh, [Partial()])
    with pytest.raises(ConfigError, match="a sum that is yet to be made has no norm"):
        ts.clip_grad_norm_(parameter, 1.0)


@pytest.mark.parametrize(
    "check",
    [
        gradients_that_differ_between_ranks_are_named,
        random_numbers_that_differ_between_ranks_are_named_as_the_reason,
        gradients_that_differ_by_rounding_alone_pass,
        gradients_that_are_dtensors_are_clipped_by_the_norm_of_the_whole,
    ],
    ids=lambda c: c.__name__,
)
def test_on_two_ranks(on_ranks, check):
    on_ranks(2, check)


def test_without_gradients_the_norm_is_on_the_device_of_the_parameters():
    model = nn.Linear(2, 2, device="meta")
    assert ts.clip_grad_norm_(model, 1.0).device == model.weight.device  # NCCL takes no tensor of the CPU


class WithoutDoubles(TorchDispatchMode):
    """Stands for a device that has no float64, as Apple's."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            msg = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
            raise TypeError(msg)
        return result


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_device_without_float64_clips(monkeypatch, norm_type):
    monkeypatch.setattr(device_types, "_APPLE", "cpu")
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with WithoutDoubles():
        norm = ts.clip_grad_norm_(model, 1.0, norm_type=norm_type)
    torch.testing.assert_close(norm, torch.tensor(2.0 if norm_type == math.inf else 32.0**0.5))
