"""DTensors are written part by part, stay DTensors, and are read under any placement."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from tp_core.errors import StateError
from tp_core.state import collect_state, load_whole_state, open_tensors, restore_state, whole, write_tensors
from tp_testing import run_ranks

SHAPE = (5, 3)  # which no number of ranks here divides
PLACEMENTS = {
    "rows": ((2,), [Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "copies": ((2,), [Replicate()]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
    "rows of four": ((4,), [Shard(0)]),
}


def uncut(parameter, value):
    return value


def make_model(mesh, placements, fill=0.0):
    model = nn.Module()
    value = torch.arange(15.0).reshape(SHAPE) + fill
    model.weight = nn.Parameter(distribute_tensor(value, mesh, placements))
    model.single = nn.Parameter(distribute_tensor(torch.full((1,), 7.0 + fill), mesh, [Shard(0)] * mesh.ndim))
    model.register_buffer("plain", torch.full((2,), fill))
    return model


def make_optimizer(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * p.detach()
        optimizer.step()
    return optimizer


def values(model, optimizer):
    found = {name: whole(tensor).tolist() for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": whole(value).tolist() for key, value in optimizer.state[p].items()}
    return found


def there_and_back(folder, before, after):
    dist.init_process_group("gloo")
    try:
        meshes = {n: init_device_mesh("cpu", PLACEMENTS[n][0]) for n in (before, after)}
        model = make_model(meshes[before], PLACEMENTS[before][1])
        optimizer = make_optimizer(model, steps=2)
        write_tensors(collect_state(model, optimizer, cut=uncut), folder, together=True)
        fresh = make_model(meshes[after], PLACEMENTS[after][1], fill=1.0)
        other = make_optimizer(fresh, steps=0)
        restore_state(fresh, other, open_tensors(folder), cut=uncut)
        moments = [other.state[p]["exp_avg"] for p in fresh.parameters()]
        assert all(isinstance(t, DTensor) for t in (*fresh.parameters(), *moments))
        assert [t.placements for t in moments] == [p.placements for p in fresh.parameters()]
        same = values(model, optimizer) == values(fresh, other)
        load_whole_state(fresh, {name: whole(t) + 1 for name, t in model.state_dict().items()})
        return same, torch.equal(whole(fresh.weight), whole(model.weight) + 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rows", "columns"),
        ("columns", "copies"),
        ("copies", "rows"),
        ("copies of rows", "blocks"),
        ("blocks", "rows of four"),
        ("rows of four", "copies of rows"),
    ],
)
def test_any_placement_is_read_under_any_other(tmp_path, before, after):
    shape, _ = PLACEMENTS[before]
    for outcome in run_ranks(there_and_back, torch.Size(shape).numel(), tmp_path, before, after):
        assert outcome == (True, True)


def a_sum_is_refused():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Module()
    model.register_buffer("total", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with pytest.raises(StateError, match="a sum that is yet to be made cannot be saved; redistribute it"):
        collect_state(model, None, cut=uncut)


@pytest.mark.slow
def test_a_sum_that_is_yet_to_be_made_is_refused():
    # In a process of its own: torch keeps the group in a cache, and a fork that empties it would crash.
    run_ranks(a_sum_is_refused, 1)
