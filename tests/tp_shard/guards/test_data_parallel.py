"""Copies of a sharded model under data parallelism never part ways."""

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.tp_shard.on_each_rank import Net, PlainNet, own

d = ts.distributed
Linear = ts.nn.ParallelLinear


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def head_loss(logits, target):
    """The loss of joined logits: the parallel loss has tests of its own."""
    return F.cross_entropy(d.gather(logits, -1, size=7), target)


def gathered_batches_give_the_backbone_the_gradient_of_an_unsharded_head():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    backbone, head = nn.Linear(6, 5).double(), nn.Linear(5, 7).double()
    plain_backbone, plain_head = nn.Linear(6, 5).double(), nn.Linear(5, 7).double()
    plain_backbone.load_state_dict(backbone.state_dict())
    plain_head.load_state_dict(head.state_dict())
    split = Linear.convert_parallel_linear(head, dim=-1)
    x, y = torch.randn(8, 6).double(), torch.arange(8) % 7
    mine = slice(rank * (8 // world), (rank + 1) * (8 // world))

    plain = DistributedDataParallel(nn.Sequential(plain_backbone, plain_head))
    F.cross_entropy(plain(x[mine]), y[mine]).backward()

    ddp = DistributedDataParallel(backbone)
    for size in (None, 8 // world * d.get_world_size()):
        ddp.zero_grad()
        split.zero_grad()
        features = d.gather_batch(ddp(x[mine]), size=size)
        head_loss(split(features), d.gather_batch(y[mine])).backward()
        close(backbone.weight.grad, plain_backbone.weight.grad)
        if d.get_world_size() == world:  # with several groups the shards' own gradients are to be averaged
            close(split.weight.grad, own(plain_head.weight.grad, 0))


def two_groups_stay_together(wrap):
    """Two copies of two shards, each copy with samples of its own; ``wrap`` is the recipe."""
    torch.manual_seed(dist.get_rank())  # seeded apart, on purpose
    net = Net().double()
    for p in net.stem.parameters():
        dist.broadcast(p.data, 0)
    plain = PlainNet().double()
    plain.load_state_dict(ts.collect_state_dict(net, net.state_dict()))
    model = wrap(net)
    data_rank = dist.get_rank() // 2
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, plain)]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x = torch.randn(8, 6, generator=generator).double()
        accumulate = step % 2 == 0
        if accumulate:
            with model.no_sync():
                model(x[data_rank * 4 :][:4]).square().mean().backward()
        else:
            model(x[data_rank * 4 :][:4]).square().mean().backward()
        plain(x).square().mean().backward()
        if accumulate:
            continue
        norms = [ts.clip_grad_norm_(model, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
        close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = ts.collect_state_dict(net, net.state_dict())
    for name, tensor in plain.state_dict().items():
        close(found[name], tensor)
    return [t.clone() for t in found.values()]


def wrapped_over_all_ranks():
    assert ts.register_ddp_parameters_to_ignore(Net()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    return two_groups_stay_together(DistributedDataParallel)


def registered_before():
    def wrap(net):
        ts.register_ddp_parameters_to_ignore(net)
        return DistributedDataParallel(net)

    return two_groups_stay_together(wrap)


def registered_afterwards():
    def wrap(net):
        ddp = DistributedDataParallel(net)
        assert "module.up.weight" in ts.register_ddp_parameters_to_ignore(ddp)
        return ddp

    return two_groups_stay_together(wrap)


def wrapped_over_the_data_group():
    return two_groups_stay_together(
        lambda net: DistributedDataParallel(net, process_group=d.get_data_group())
    )


def a_split_layer_alone_under_ddp_keeps_its_shards():
    torch.manual_seed(1)
    root = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Linear(4, 9, dim=1))))
    before = root[0][1][0].weight.clone()
    ddp = DistributedDataParallel(root)
    assert torch.equal(root[0][1][0].weight, before)
    ddp(torch.ones(1, 4)).sum().backward()
    assert root[0][1][0].weight.grad is not None


@pytest.mark.parametrize(
    "check",
    [
        wrapped_over_all_ranks,
        *(
            pytest.param(check, marks=pytest.mark.slow)
            for check in (registered_before, registered_afterwards, wrapped_over_the_data_group)
        ),
    ],
    ids=lambda c: c.__name__,
)
def test_two_groups_under_data_parallelism_never_part(on_ranks, check):
    first, *others = on_ranks(4, check, group_size=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def all_split():
    torch.manual_seed(3)
    return nn.Sequential(Linear(6, 8, dim=-1), nn.Tanh(), Linear(8, 6, dim=0)).double()


def a_model_of_split_layers_alone_is_wrapped_before_and_after_they_are_registered():
    rank, per_group = dist.get_rank(), d.get_world_size()
    copies = dist.get_world_size() // per_group
    x = torch.linspace(-1, 1, 4 * 6).double().reshape(4, 6)
    mine = x.chunk(copies)[rank // per_group]
    whole = all_split()
    whole(x).square().mean().backward()
    for first in (True, False):
        model = all_split()
        if first:
            ts.register_ddp_parameters_to_ignore(model)
        ddp = DistributedDataParallel(model)
        assert isinstance(ddp, DistributedDataParallel)
        assert len(ts.register_ddp_parameters_to_ignore(ddp)) == 4
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):  # torch's own would wait for gradients in the second step
            optimizer.zero_grad()
            ddp(mine).square().mean().backward()
        for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
            close(p.grad, expected.grad)
        with ddp.no_sync():
            ddp(mine)
        assert set(ddp.state_dict()) == {f"module.{n}" for n in model.state_dict()}


def test_one_group_of_split_layers_alone(on_ranks):
    on_ranks(2, a_model_of_split_layers_alone_is_wrapped_before_and_after_they_are_registered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        a_model_of_split_layers_alone_is_wrapped_before_and_after_they_are_registered,
        gathered_batches_give_the_backbone_the_gradient_of_an_unsharded_head,
        a_split_layer_alone_under_ddp_keeps_its_shards,
    ],
    ids=lambda c: c.__name__,
)
def test_two_groups_under_data_parallelism(on_ranks, check):
    on_ranks(4, check, group_size=2)


def test_the_names_to_ignore_of_the_manual():
    m = nn.ModuleDict({"layer1": nn.Linear(20, 20), "layer2": Linear(20, 30)})
    assert ts.register_ddp_parameters_to_ignore(m) == ["layer2.weight", "layer2.bias"]


@pytest.mark.slow
def test_one_group_of_four_gathers_batches(on_ranks):
    on_ranks(4, gathered_batches_give_the_backbone_the_gradient_of_an_unsharded_head)
