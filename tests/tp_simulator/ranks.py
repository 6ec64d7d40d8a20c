"""What ranks do with simulated devices, each in a process of its own."""

import copy
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_simulator
from torch import nn
from tp_core import LaunchEnvironment

TIMEOUT_S = 60


def join(timeout_s=TIMEOUT_S, device=None):
    """Add devices to this process, and make the group of the launcher's ranks."""
    tp_simulator.activate(2)
    rank = LaunchEnvironment.read().rank
    torch.accelerator.set_device_index(rank if device is None else device)
    dist.init_process_group(dist.get_default_backend_for_device("sim"), timeout=timedelta(seconds=timeout_s))
    assert dist.get_backend() == "simccl"
    return rank


def here():
    return torch.device("sim", torch.accelerator.current_device_index())


def tensor_of(rank, *size, dtype=torch.float32):
    count = torch.Size(size).numel()
    return (torch.arange(count, dtype=dtype) + 10 * rank + 1).reshape(size)


# -- Every collective, beside the same over gloo ----------------------------------------------------


def collectives(device, group):
    """Call every collective; return what each has left, on the CPU."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(*shape, dtype=torch.float32):
        return tensor_of(rank, *shape, dtype=dtype).to(device)

    def empty(*shape):
        return torch.zeros(*shape, device=device)

    found = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        found[op] = mine(3)
        dist.all_reduce(found[op], getattr(dist.ReduceOp, op), group=group)
    found["int"] = mine(3, dtype=torch.int64)
    dist.all_reduce(found["int"], group=group)
    found["broadcast"] = mine(2, 2)
    dist.broadcast(found["broadcast"], 1, group=group)
    found["all_gather"] = [empty(3) for _ in range(size)]
    dist.all_gather(found["all_gather"], mine(3), group=group)
    found["all_gather_into_tensor"] = empty(size * 2, 3)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], mine(2, 3), group=group)
    found["reduce_scatter_tensor"] = empty(2)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], mine(size * 2), group=group)
    found["reduce_scatter"] = empty(2)
    dist.reduce_scatter(found["reduce_scatter"], [mine(2) * (i + 1) for i in range(size)], group=group)
    found["all_to_all_single"] = empty(4)
    sent, received = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
    dist.all_to_all_single(found["all_to_all_single"], mine(4), received, sent, group=group)
    found["scatter"] = empty(2)
    dist.scatter(found["scatter"], [mine(2) + i for i in range(size)] if rank == 1 else None, 1, group=group)
    gathered = [empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(2), gathered, 0, group=group)
    found["gather"] = gathered or []
    reduced = mine(2)
    dist.reduce(reduced, 0, group=group)
    found["reduce"] = reduced if rank == 0 else []
    other, came = 1 - rank, [empty(2), empty(3)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, came[0], other, group), dist.P2POp(dist.isend, mine(2), other, group)]
    )
    for work in works:
        work.wait()
    if rank == 0:
        dist.send(mine(3), 1, group=group)
    else:
        dist.recv(came[1], 0, group=group)
    found["messages"] = came
    dist.barrier(group=group)
    return torch.utils._pytree.tree_map(lambda x: x.cpu(), found)


def compare_collectives():
    cpu = dist.new_group(backend="gloo")
    expected = collectives("cpu", cpu)
    for seed in (None, 0, 1, 2):
        with tp_simulator.watch() if seed is None else tp_simulator.hostile(seed) as report:
            found = collectives(here(), dist.group.WORLD)
        torch.testing.assert_close(found, expected)
        assert not report.races, report
    average = tensor_of(dist.get_rank(), 2).to(here())
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [6.0, 7.0]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]


# -- Who waits for whom -------------------------------------------------------------------------------


def go_on_without_the_others(seed):
    """The host goes on while the other rank has yet to come; it waits where NCCL's would."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    x = torch.full((4,), 1.0 + rank, device=here())
    with tp_simulator.watch() if seed is None else tp_simulator.hostile(seed) as report:
        if rank == 1:
            store.wait([f"gone on {seed}"])
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        if rank == 0:
            store.set(f"gone on {seed}", "")
        waits = report.synchronizations
        assert y.tolist() == [6.0] * 4
        work = dist.all_reduce(x, async_op=True)
        before = report.synchronizations
        work.wait(timedelta(seconds=TIMEOUT_S))
        assert report.synchronizations == before + 1
        assert work.is_completed()
    assert not report.races, report
    return waits


def forget_to_wait():
    """Return the races of a program that reads what a collective has yet to write."""
    x = torch.ones(4, device=here())
    with tp_simulator.hostile() as report:
        work = dist.all_reduce(x, async_op=True)
        y = x + 1
        work.wait()
    torch.accelerator.synchronize()
    return report.races, y.tolist()


def free_what_a_collective_has_done():
    """Free a tensor whose collective is done while another has yet to be; return by how much memory grows."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    x, small = torch.ones(3 * 2**20, device=here()), torch.ones(4, device=here())
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()
    if rank == 1:
        store.wait(["freed"])
    later = dist.all_reduce(small, async_op=True)
    before = torch.sim.memory_reserved()
    del x, work
    again = torch.empty(3 * 2**20, device=here())
    grown = torch.sim.memory_reserved() - before
    del again
    if rank == 0:
        store.set("freed", "")
    later.wait()
    assert small.tolist() == [2.0] * 4
    return grown


# -- Ranks that disagree, and tensors that are refused --------------------------------------------------


def _message(function, *arguments, **options):
    try:
        function(*arguments, **options)
        torch.accelerator.synchronize()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def refusals():
    x = torch.ones(4, 4, device=here())
    return [
        _message(dist.all_reduce, torch.ones(3), group=dist.new_group(backend="simccl")),
        _message(dist.all_reduce, x.t()[1:]),
        _message(dist.all_reduce, x, dist.ReduceOp.BAND),
        _message(dist.all_gather_into_tensor, x, x),
        _message(dist.isend, x, dist.get_rank()),
    ]


def call_different_things():
    rank = join()
    x = torch.ones(4, device=here())
    return _message(dist.all_reduce, x) if rank == 0 else _message(dist.broadcast, x, 0)


def bring_other_shapes():
    return _message(dist.all_reduce, torch.ones(4 + join(), device=here()))


def stay_away():
    """Rank 1 does not come to the second call; return what rank 0 is told."""
    rank = join(timeout_s=2)
    x = torch.ones(4, device=here())
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(6)
        return ""
    return _message(dist.broadcast, x, 0)


def send_first_on_both():
    rank = join(timeout_s=2)
    x = torch.ones(4, device=here())
    dist.isend(x, 1 - rank)
    dist.irecv(x, 1 - rank)
    return _message(torch.accelerator.synchronize)


def share_a_device():
    join(device=0)
    return _message(dist.all_reduce, torch.ones(1, device="sim:0"))


# -- torch's own parallelism ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def _model():
    torch.manual_seed(0)
    return Net()


def _batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 8, generator=generator) for _ in range(4)]


def _loss(output):
    return F.mse_loss(output, torch.zeros_like(output))


def _train(model, batches, step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        step(model, batch)
        optimizer.step()


def _alone():
    model = _model()
    _train(model, _batches(), lambda model, batch: _loss(model(batch)).backward())
    return model.state_dict()


def _part(batch):
    return batch.chunk(2)[dist.get_rank()].pin_memory().to(here(), non_blocking=True)


def with_ddp():
    model = nn.parallel.DistributedDataParallel(_model().to(here()), bucket_cap_mb=0.001)
    _train(model, _batches(), lambda model, batch: _loss(model(_part(batch))).backward())
    return {name: value.cpu() for name, value in model.module.state_dict().items()}


def with_fsdp():
    from torch.distributed.fsdp import fully_shard

    model = _model().to(here())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    _train(model, _batches(), lambda model, batch: _loss(model(_part(batch))).backward())
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


def with_pipelining():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, whole = dist.get_rank(), _model()
    stage_module = copy.deepcopy(whole)
    stage_module.layers = whole.layers[2 * rank : 2 * rank + 2]
    stage_module.to(here())
    stage = PipelineStage(stage_module, rank, 2, here())
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)

    def step(_, batch):
        batch = batch.to(here())
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=torch.zeros_like(batch))

    _train(stage_module, _batches(), step)
    parts = [None, None]
    dist.all_gather_object(parts, {k: v.cpu() for k, v in stage_module.state_dict().items()})
    numbered = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            _, layer, rest = name.split(".", 2)
            numbered[f"layers.{int(layer) + 2 * rank}.{rest}"] = value
    return numbered


def train_as_one(function, seed):
    """Train with one of torch's own; return the races. The numbers have to be those of one process."""
    with tp_simulator.hostile(seed) as report:
        found = function()
    expected = _alone()
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)
    return report.races
