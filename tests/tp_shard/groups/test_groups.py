"""Who holds tensors together, and what is said when it cannot be."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError, LaunchEnvironmentError
from tp_core.sessions import rendezvous_store
from tp_shard._groups._group import current_data_group  # private: no public name has the rank in it
from tp_shard.distributed import Group
from tp_testing import run_ranks


@pytest.fixture
def alone():
    ts.distributed.init_process_group()
    yield
    ts.distributed.destroy_process_group()


def who():
    d = ts.distributed
    return d.is_initialized(), d.get_rank(), d.get_world_size(), d.get_group() is not None


def test_without_a_process_group_there_is_rank_0_of_1():
    assert who() == (False, 0, 1, False)
    ts.distributed.init_process_group()
    assert who() == (True, 0, 1, False)
    ts.distributed.destroy_process_group()
    assert who() == (False, 0, 1, False)


@pytest.mark.usefixtures("alone")
def test_groups_are_formed_once():
    with pytest.raises(ConfigError, match="formed already"):
        ts.distributed.init_process_group()


@pytest.mark.parametrize(
    ("size", "message"),
    [(2, "2 ranks was asked for, and this is the only"), (True, "a number or a DeviceMesh, got bool")],
)
def test_a_group_size_that_cannot_be_is_refused(size, message):
    with pytest.raises(ConfigError, match=message):
        ts.distributed.init_process_group(size)


def test_an_incomplete_launch_and_a_missing_group_are_told(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchEnvironmentError, match="RANK is not set"):
        ts.distributed.init_process_group()
    with pytest.raises(ConfigError, match=r"2 processes and no model-parallel group"):
        ts.distributed.reduce(torch.ones(1))


def four_ranks():
    d = ts.distributed
    d.init_process_group()  # joins torch's group by itself
    rank = dist.get_rank()
    seen = {}
    seen["whole"] = (*who(), d.get_data_group())
    d.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("again", rendezvous_store(LaunchEnvironment.read())),
        rank=rank,
        world_size=4,
    )
    d.init_process_group(2)
    seen["twos"] = who()
    data = d.get_data_group()
    seen["data"] = dist.get_process_group_ranks(data)
    group = ts.nn.ParallelLinear(2, 2, dim=0).group
    assert copy.deepcopy(group) is group
    assert pickle.loads(pickle.dumps(group)) is group
    with pytest.raises(ConfigError, match="4 ranks cannot form groups of 3"):
        d.destroy_process_group() or d.init_process_group(3)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    d.init_process_group(mesh)
    seen["mesh"] = (
        dist.get_process_group_ranks(d.get_group()),
        dist.get_process_group_ranks(d.get_data_group()),
    )
    d.destroy_process_group()
    d.init_process_group(mesh["dp"])
    seen["axis"] = dist.get_process_group_ranks(d.get_group())
    dist.destroy_process_group()
    assert not d.is_initialized()
    return rank, seen


def test_groups_of_neighbours_and_groups_of_a_mesh():
    for rank, seen in run_ranks(four_ranks, 4):
        assert seen["whole"] == (True, rank, 4, True, None)
        assert seen["twos"] == (True, rank % 2, 2, True)
        assert seen["data"] == [rank % 2, rank % 2 + 2]
        assert seen["mesh"] == ([rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1])
        assert seen["axis"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_a_group_out_of_a_pickle_of_another_job_says_so_when_it_is_used():
    restored = pickle.loads(pickle.dumps(Group(1, 2)))
    assert (restored.rank, restored.size) == (1, 2)
    with pytest.raises(ConfigError, match=r"shard 1 of 2.*init_process_group\(2\)"):
        _ = restored.handle
    alone = ts.nn.ParallelLinear(2, 2, dim=0).group
    assert pickle.loads(pickle.dumps(alone)) is alone


def on_a_mesh_of_data_by_tensor():
    """Layers take a mesh's axis by itself, without any current group, under DDP on the other axis."""
    world = ts.distributed
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    with pytest.raises(ConfigError, match=r"a mesh of one axis, got 2"):
        ts.nn.ParallelLinear(4, 4, dim=1, group=mesh)
    with pytest.raises(ConfigError, match="no model-parallel group"):
        ts.nn.ParallelLinear(4, 4, dim=1)
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    torch.manual_seed(3)
    group = mesh["tp"]
    net = torch.nn.Sequential(
        ts.nn.ParallelLinear(4, 5, dim=1, group=group),
        torch.nn.Tanh(),
        ts.nn.ParallelLinear(5, 4, dim=0, group=group),
    ).double()
    x = torch.linspace(-1, 1, 16).reshape(4, 4).double()
    ddp = torch.nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])
    ddp(x[rank // 2 * 2 :][:2]).square().mean().backward()
    plain(x).square().mean().backward()
    gradients = ts.collect_state_dict(net, {n: p.grad for n, p in net.named_parameters()})
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    with pytest.raises(ConfigError, match=r"has 4 ranks, more than hold 1.0.weight together"):
        torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(4, 4).double(), copy.deepcopy(net))
        )
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ConfigError, match=rf"rank {rank} of all, is not in the group"):
            ts.nn.ParallelLinear(4, 4, dim=1, group=others)
    world.init_process_group(mesh)
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x), net(x))
    world.destroy_process_group()


def a_group_of_several_axes_counts_its_ranks_itself():
    ranks = [[[3], [2]], [[1], [0]]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    d = ts.distributed
    d.init_process_group(mesh)
    data = current_data_group()  # private: no public name has the rank, by which samples are shared out
    assert data.rank == dist.get_rank(d.get_data_group())
    d.destroy_process_group()


def who_is_where(mesh):
    d = ts.distributed
    d.init_process_group(mesh)
    groups = d.get_group(), d.get_data_group()
    found = [None if group is None else dist.get_process_group_ranks(group) for group in groups]
    d.destroy_process_group()
    return found


def meshes_of_several_axes():
    dist.init_process_group("gloo")
    a_group_of_several_axes_counts_its_ranks_itself()
    rank = dist.get_rank()
    for shape, names, tensor, data in [
        ((2, 1, 2), ("dp_replicate", "dp_shard", "tp"), [rank & 2, rank | 1], [rank & 1, rank | 2]),
        ((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), [rank], [0, 1, 2, 3]),
        ((1, 2, 2), ("pp", "dp", "tp"), [rank & 2, (rank & 2) | 1], [rank & 1, rank | 2]),
        ((2, 1, 2), ("pp", "dp", "model"), [rank & 2, rank | 1], [rank]),
        ((2, 2), ("pp", "tp"), [rank & 2, rank | 1], None),
        ((2, 2), ("copies", "tp"), [rank & 2, rank | 1], [rank & 1, rank | 2]),
    ]:
        assert who_is_where(init_device_mesh("cpu", shape, mesh_dim_names=names)) == [tensor, data], names
    for shape, names, message in [
        ((2, 1, 2), None, r"3 axes of sizes \(2, 1, 2\) has one named 'tp', .* got the names None"),
        ((2, 1, 2), ("tp", "dp", "model"), r"has one named 'tp'.*got the names \('tp', 'dp', 'model'\)"),
        ((2, 1, 2), ("dp", "copies", "tp"), r"axis 'copies' .* is not known: .*mesh\['dp', 'tp'\]"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ts.distributed.init_process_group(init_device_mesh("cpu", shape, mesh_dim_names=names))
    part = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    if rank > 1:
        with pytest.raises(ConfigError, match=rf"rank {rank} of all, is not in the mesh that was given"):
            ts.distributed.init_process_group(part)


def test_meshes_of_several_axes():
    run_ranks(meshes_of_several_axes, 4)


def torchs_own():
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer

    hooks = list(optimizer._global_optimizer_pre_hooks.values())
    return torch.nn.parallel.DistributedDataParallel.__init__, clip_grad._clip_grads_with_norm_, hooks


def functions_of_torch_are_replaced_while_there_are_groups():
    d = ts.distributed
    before = torchs_own()
    d.init_process_group(1)
    ts.nn.ParallelLinear(4, 4, dim=1)
    ts.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), {"0": ts.Column()})
    assert torchs_own() == before
    for _ in range(2):
        d.destroy_process_group()
        assert torchs_own() == before
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("again", rendezvous_store(LaunchEnvironment.read())),
                rank=int(LaunchEnvironment.read().rank),
                world_size=2,
            )
        d.init_process_group()
        now = torchs_own()
        assert all(new != old for new, old in zip(now, before, strict=True))
        layer = ts.nn.ParallelLinear(4, 4, dim=1)
        assert torchs_own() == now
    dist.destroy_process_group()  # and ours with it
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.nn.utils.clip_grad_norm_(layer.weight, 1.0)
    assert torchs_own() == before


def test_functions_of_torch_are_replaced_while_there_are_groups():
    run_ranks(functions_of_torch_are_replaced_while_there_are_groups, 2)


def joins_the_world():
    dist.init_process_group("gloo")
    on_a_mesh_of_data_by_tensor()


def test_a_mesh_of_data_by_tensor():
    run_ranks(joins_the_world, 4)


def formed_twice():
    sizes = []
    for _ in range(2):
        ts.distributed.init_process_group()
        sizes.append(int(ts.distributed.reduce(torch.ones(1)).item()))
        ts.distributed.destroy_process_group()
    return sizes


def test_groups_are_formed_again_after_they_were_taken_down():
    assert run_ranks(formed_twice, 2) == [[2, 2]] * 2
