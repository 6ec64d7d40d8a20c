"""The collectives of a forecast are those that a rank issues: counted in a process group that is not there.

torch's fake process group does nothing and says that it is done, so that one process is any rank of 4,096.
It is private to torch; nothing public takes its place.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import tp_context
import tp_shard as ts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core import LaunchEnvironment
from tp_core.jobs import Footprint, Layout
from tp_core.plugins import Job, registry
from tp_trainer._memory import measure_footprint  # private: a plan adds much to it

from tests.tp_context.cuts import activate, cuts_of

KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}


class Counting(TorchDispatchMode):
    """Counts collectives and the bytes of the whole tensor of each, by kind."""

    def __init__(self):
        super().__init__()
        self.times, self.nbytes = Counter(), Counter()

    def __torch_dispatch__(self, operator, _, args=(), kwargs=None):
        name = str(operator).split(".")[1]
        if str(operator).startswith("c10d.") and name in KINDS:
            tensors = [
                t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)
            ]
            self.times[KINDS[name]] += 1
            self.nbytes[KINDS[name]] += max(t.nbytes for t in tensors)
        return operator(*args, **(kwargs or {}))


@pytest.fixture(params=[8, pytest.param(4096, marks=pytest.mark.slow)])
def ranks(request):
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def model():
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(64, 8192, bias=False))


def forecast_of(name, plain, layout, footprint=None):
    (backend,) = [c.item for c in registry.backends() if c.item.name == name]
    nbytes = sum(p.nbytes for p in plain.parameters())
    found = footprint or Footprint(weights=nbytes, gradients=nbytes, optimizer=0, activations=0)
    job = Job(
        devices=(torch.device("cpu"),),
        environment=LaunchEnvironment(world_size=layout.ranks, local_world_size=8),
        model=plain,
        options=layout.options,
        footprint=found,
    )
    return backend.forecast(job, layout)


def counted(forecast):
    times, sizes = Counter(), Counter()
    for transfer in forecast.work.transfers:
        times[transfer.kind] += transfer.times
        sizes[transfer.kind] += transfer.times * transfer.nbytes
    return times, sizes


@pytest.mark.parametrize("again", [True, False])
def test_of_shards(ranks, again):
    plain = model()
    for each in plain[:3]:
        fully_shard(each, reshard_after_forward=again)
    fully_shard(plain)
    counting = Counting()
    with counting:
        plain(torch.ones(2, 64)).sum().backward()
    layout = Layout(
        axes={"fsdp": ranks},
        options={
            "fsdp": {"reshard_after_forward": again, "activation_checkpointing": False, "offload": False}
        },
    )
    times, sizes = counted(forecast_of("fsdp", model(), layout))
    assert times == counting.times
    assert dict(sizes) == pytest.approx(counting.nbytes, rel=0.02)


class Words(nn.Module):
    """Blocks with an embedding and a head, as transformers' models have them."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=8)
        self.words = nn.Embedding(2048, 64)
        self.blocks = nn.ModuleList(nn.Sequential(Block()) for _ in range(3))
        self.head = nn.Linear(64, 2048, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("ranks", [8], indirect=True)
def test_of_split_tensors(ranks):
    tokens, plain = torch.zeros(2, 32, dtype=torch.long), Words()
    footprint = measure_footprint(
        plain, None, tokens, lambda m, b: nn.functional.cross_entropy(m(b).flatten(0, 1), b.flatten())
    )
    ts.distributed.init_process_group(ranks)
    pair = {"blocks.*.0.up": ts.Column(), "blocks.*.0.down": ts.Row()}
    plan = {**pair, "words": ts.Vocab(), "head": ts.Vocab(gather_output=True)}
    split, counting = ts.parallelize(plain, plan), Counting()
    try:
        with counting:
            split(tokens).sum().backward()
    finally:
        ts.distributed.destroy_process_group()
    options = {"shard": {"group_size": ranks, "data": "ddp"}}
    layout = Layout(axes={"data": 1, "tensor": ranks}, options=options)
    found = forecast_of("shard", Words(), layout, footprint)
    times, sizes = counted(found)
    assert times == counting.times
    assert dict(sizes) == dict(counting.nbytes)
    # At the loss: log-probabilities and two gradients of whole logits, before there is one of a weight.
    assert found.memory.gradients + found.memory.activations >= 3 * tokens.numel() * 2048 * 4


def test_of_split_sequences(ranks):
    def attend(module, batch):
        return tp_context.attention(*batch, is_causal=True).sum() * module.weight.sum()

    footprint = measure_footprint(nn.Linear(1, 1), None, torch.rand(3, 2, 4, ranks, 16), attend)
    counting = Counting()
    batch = torch.rand(3, 2, 4, 1, 16, requires_grad=True)  # a token on each rank
    with counting, activate(cuts_of(ranks, rank=0, size=ranks)):
        attend(nn.Linear(1, 1), batch).backward()
    options = {"context": {"context": ranks, "weights": "whole"}}
    layout = Layout(axes={"data": 1, "context": ranks}, options=options)
    times, sizes = counted(forecast_of("context", model(), layout, footprint))
    for found, each in ((times, 1), (sizes, 256 * ranks)):
        del found["all-reduce"]  # of gradients
        found["all-gather"] -= 2 * each  # of what ranks compare around a step
    assert times == counting.times
    assert dict(sizes) == dict(counting.nbytes)
