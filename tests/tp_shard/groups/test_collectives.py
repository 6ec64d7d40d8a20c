"""Each collective equals what it stands for, forward and backward, and writes into nothing of others'."""

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from tp_core.errors import ConfigError, DisagreementError

d = ts.distributed


def whole(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def scatter_takes_the_shard_and_gathers_its_gradient():
    rank, n = d.get_rank(), d.get_world_size()
    for shape, dim in [((3, 9), -1), ((10, 2), 0), ((2, 3, 4), 1), ((3, 1), -1)]:
        full = whole(*shape).requires_grad_()
        shard = d.scatter(full, dim)
        expected = ts.slice(full.detach(), n, dim)[rank]
        assert torch.equal(shard, expected)
        assert shard.untyped_storage().nbytes() == shard.numel() * 8
        (shard * (rank + 1)).sum().backward()
        factors = torch.cat([torch.full_like(s, i + 1) for i, s in enumerate(ts.slice(full, n, dim))], dim)
        assert torch.equal(full.grad, factors)


def gather_joins_shards_of_any_size_and_splits_the_gradient():
    rank, n = d.get_rank(), d.get_world_size()
    for shape, dim in [((3, 9), -1), ((10, 2), 0), ((2, 3, 4), 1), ((3, 1), -1), ((5,), 0)]:
        full = whole(*shape)
        shard = ts.slice(full, n, dim)[rank].clone().requires_grad_()
        for size in (None, shape[dim]):
            shard.grad = None
            joined = d.gather(shard, dim, size=size)
            assert torch.equal(joined, full)
            (joined * full).sum().backward()
            assert torch.equal(shard.grad, shard.detach())
    odd = d.gather(torch.full((rank * 2, 2), float(rank)), 0)  # sizes of nobody's rule
    assert odd[:, 0].tolist() == [float(r) for r in range(n) for _ in range(2 * r)]


def a_gather_of_what_is_not_contiguous_is_right():
    rank, n = d.get_rank(), d.get_world_size()
    full = whole(8, 4)
    shard = ts.slice(full, n, 0)[rank].t()  # (4, local)
    assert not shard.is_contiguous()
    assert torch.equal(d.gather(shard, 1), full.t())
    assert torch.equal(d.gather(ts.slice(full.t(), n, 0)[rank], 0), full.t())


def reduce_sums_into_a_new_tensor():
    rank, n = d.get_rank(), d.get_world_size()
    x = torch.full((3, 2), float(rank + 1), requires_grad=True)
    version = x._version
    total = d.reduce(x)
    assert torch.equal(total, torch.full((3, 2), n * (n + 1) / 2))
    assert torch.equal(x, torch.full((3, 2), float(rank + 1)))
    assert x._version == version
    # A tensor that autograd saved is whole when it goes back through it.
    y = x * x
    (d.reduce(y) * y).sum().backward()
    squares = sum(float(r + 1) ** 2 for r in range(n))
    expected = 2 * x.detach() * (x.detach() ** 2 + squares)
    torch.testing.assert_close(x.grad, expected)
    parameter = nn.Parameter(torch.ones(2) * (rank + 1))
    d.reduce(parameter)
    assert torch.equal(parameter.data, torch.ones(2) * (rank + 1))


def copy_sums_the_gradient_and_leaves_the_other_branch_of_a_residual_alone():
    rank, n = d.get_rank(), d.get_world_size()
    x = torch.ones(4, requires_grad=True)
    seen = []
    out = d.copy(x)
    out.register_hook(lambda g: seen.append((g, g.clone())))
    branch = x * 1
    branch.register_hook(lambda g: seen.append((g, g.clone())))
    # Both branches get the very same gradient tensor from the addition.
    ((out + branch) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), n * (n + 1) / 2 + rank + 1))
    for gradient, before in seen:
        assert torch.equal(gradient, before)


def all_of_them_are_differentiable_twice():
    x = whole(2, 4).requires_grad_()
    y = d.gather(d.scatter(x**3), -1)
    (g,) = torch.autograd.grad(d.copy(y).sum() / d.get_world_size(), x, create_graph=True)
    torch.testing.assert_close(g, 3 * x**2)
    (h,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(h, 6 * x)


def what_is_no_shard_or_no_dim_is_refused():
    rank, n = d.get_rank(), d.get_world_size()
    with pytest.raises(ConfigError, match=rf"rank {rank} of {n} holds 3 of 9 in dim 1.*shards have sizes"):
        d.gather(torch.ones(2, 3), -1, size=9)
    with pytest.raises(ConfigError, match="has no dim 2"):
        d.scatter(torch.ones(2, 3), 2)


def debug_mode_names_what_differs():
    rank = d.get_rank()
    with d.debug():
        assert torch.equal(d.reduce(torch.ones(2)), torch.full((2,), float(d.get_world_size())))
        with pytest.raises(
            DisagreementError, match=r"rank 0 .*all_reduce.*float32.*shape \(1\).*rank 1 .*\(2\)"
        ):
            d.reduce(torch.ones(rank + 1))
        with pytest.raises(DisagreementError, match=r"float32.*float64"):
            d.gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32), 0)
        d.gather(torch.ones(2, rank + 1), 1)  # the cut dimension may differ
        with pytest.raises(DisagreementError, match=r"all_gather of sizes.*all_reduce"):
            d.reduce(torch.ones(1)) if rank else d.gather(torch.ones(1), 0)
        table = ts.nn.ParallelEmbedding(5, 4, dim=1, max_norm=1.0)
        with pytest.raises(DisagreementError, match=r"all_reduce of norms.*shape \(2\).*shape \(1\)"):
            table(torch.tensor([0] if rank else [0, 1]))
    layers = nn.ModuleDict(
        {"a": ts.nn.ParallelLinear(4, 4, dim=0), "b": ts.nn.ParallelLinear(4, 4, bias=False, dim=0)}
    )
    with d.debug(layers), pytest.raises(DisagreementError, match=r"'a' = ParallelLinear\(.*rank 1.*'b' = "):
        layers["b" if rank else "a"](torch.ones(1, 4))


CHECKS = [
    scatter_takes_the_shard_and_gathers_its_gradient,
    gather_joins_shards_of_any_size_and_splits_the_gradient,
    a_gather_of_what_is_not_contiguous_is_right,
    reduce_sums_into_a_new_tensor,
    copy_sums_the_gradient_and_leaves_the_other_branch_of_a_residual_alone,
    all_of_them_are_differentiable_twice,
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_collectives_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.parametrize(
    "check",
    [what_is_no_shard_or_no_dim_is_refused, debug_mode_names_what_differs],
    ids=lambda c: c.__name__,
)
def test_collectives_on_two_ranks(on_ranks, check):
    on_ranks(2, check)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_collectives_without_a_process_group(check):
    check()


def two_groups_of_two():
    rank = dist.get_rank()
    assert d.reduce(torch.tensor([float(rank)])).item() == (1.0 if rank < 2 else 5.0)
    assert d.gather(torch.tensor([float(rank)]), 0).tolist() == ([0.0, 1.0] if rank < 2 else [2.0, 3.0])
    assert d.reduce(torch.tensor([float(rank)]), group=dist.group.WORLD).item() == 6.0


def test_groups_beside_each_other_do_not_mix(on_ranks):
    on_ranks(4, two_groups_of_two, group_size=2)
