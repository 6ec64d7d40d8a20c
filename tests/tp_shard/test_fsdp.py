"""fully_shard over the copies of a split model: clipping, states and groups are those of the whole model."""

import copy
import functools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from tp_core.errors import ConfigError, DisagreementError, StateError
from tp_shard._groups._group import ALONE  # private: the group of a rank alone
from tp_testing import RankPool

from tests.reference_training import train

pytestmark = pytest.mark.slow  # all on four ranks

d = ts.distributed

MESHES = {
    "2x2": ((2, 2), ("dp", "tp")),
    "2x1x2": ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),
    "1x2x2": ((1, 2, 2), ("dp_replicate", "dp_shard", "tp")),
    "2x2x1": ((2, 2, 1), ("dp_replicate", "dp_shard", "tp")),
}
PLAN = {
    "table": ts.Vocab(),
    "blocks.*.attention.qkv": ts.Column(heads=4, kv_heads=1, holds="qkv"),
    "blocks.*.attention.out": ts.Row(heads=4, kv_heads=1),
    "blocks.*.up": ts.Column(),
    "blocks.*.act": ts.Replicated(),
    "blocks.*.down": ts.Row(),
    "head": ts.Vocab(gather_output=True),
}


class Attention(nn.Module):
    """Four query heads and a single key head, which ranks share."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 12), nn.Linear(8, 6)

    def forward(self, x):
        group = getattr(self.qkv, "group", ALONE)
        return self.out(ts.nn.functional.parallel_attention(self.qkv(x), 4, 1, group=group))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()
        self.up, self.act, self.down = nn.Linear(6, 9), nn.PReLU(), nn.Linear(9, 6)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)))


TOKENS = torch.arange(4 * 5).reshape(4, 5) % 11


def loss_of(model, tokens=TOKENS):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def mine():
    """Return the samples of this copy of the model."""
    group = d.get_data_group()
    return TOKENS if group is None else TOKENS.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def plain():
    torch.manual_seed(3)
    return Net().double()


def split(*, cut=True):
    """A split model, cut over the copies by ``fully_shard`` where there are some."""
    model = ts.parallelize(plain(), PLAN)
    return cut_over_data(model) if cut and d.get_data_group() is not None else model


def cut_over_data(model):
    mesh = d.mesh_of_this_test
    names = tuple(n for n in mesh.mesh_dim_names if n != "tp")
    mesh = mesh[names] if len(names) > 1 else mesh[names[0]]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model):
    # Softmax is deaf to the bias of keys: its gradient is rounding, which an eps of 1e-8 would make steps of.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def all_close(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def training_and_clipping_are_those_of_the_whole_model():
    whole, model = plain(), split()
    optimizers = [adamw(whole), adamw(model)]
    for norm_type in (2.0, 1.0, math.inf):
        for m, tokens in ((whole, TOKENS), (model, mine())):
            loss_of(m, tokens).backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type)
        close(ts.clip_grad_norm_(model, 0.1, norm_type), expected)
        close(
            ts.clip_grad_norm_(list(model.parameters()), 9.0),
            nn.utils.get_total_norm([p.grad for p in whole.parameters()]),
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    all_close(ts.collect_state_dict(model, model.state_dict()), whole.state_dict())
    first = ts.collect_state_dict(model, model.state_dict(), to="rank0")
    all_close(first, whole.state_dict() if dist.get_rank() == 0 else {})


def what_mixes_elements_is_refused():
    if d.get_world_size() == 1:
        return
    model = split()
    loss_of(model, mine()).backward()
    before = [p.grad.to_local().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=r"call ts.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(ConfigError, match="Adafactor computes with whole matrices"):
        torch.optim.Adafactor(model.parameters()).step()
    with pytest.raises(ConfigError, match="Muon computes with whole matrices"):
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]).step()
    assert all(torch.equal(p.grad.to_local(), g) for p, g in zip(model.parameters(), before, strict=True))


def parameters_come_in_groups():
    names = {id(p): n for n, p in split(cut=False).named_parameters()}
    groups = ts.parameter_groups(split(), weight_decay=0.1)
    expected = ts.parameter_groups(split(cut=False), weight_decay=0.1)
    assert [(g["name"], len(g["params"])) for g in groups] == [
        (g["name"], len(g["params"])) for g in expected
    ]
    assert len(names) == sum(len(g["params"]) for g in groups)
    torch.optim.AdamW(groups)


def optimizers_and_models_are_collected_and_relocated():
    whole, model = plain(), split()
    optimizers = [adamw(whole), adamw(model)]
    train(whole, optimizers[0], [TOKENS] * 2, loss_of)
    train(model, optimizers[1], [mine()] * 2, loss_of)
    expected, found = (
        copy.deepcopy(optimizers[0].state_dict()),
        ts.collect_optimizer_state_dict(model, optimizers[1]),
    )
    assert found["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            close(found["state"][index][key], value)
    fresh = split()
    optimizer = adamw(fresh)
    fresh.load_state_dict(ts.relocate_state_dict(fresh, whole.state_dict()))
    optimizer.load_state_dict(ts.relocate_optimizer_state_dict(fresh, optimizer, expected))
    train(whole, optimizers[0], [TOKENS] * 2, loss_of)
    train(fresh, optimizer, [mine()] * 2, loss_of)
    all_close(ts.collect_state_dict(fresh, fresh.state_dict()), whole.state_dict())
    if d.get_world_size() == 1:
        return
    with pytest.raises(StateError, match=r"blocks.0.up.weight has shape \(2, 6\)"):
        ts.relocate_state_dict(fresh, {"blocks.0.up.weight": torch.ones(2, 6)})


def train_and_write(folder):
    """Return what the whole model would have after the steps that are written, and its next loss."""
    model = split()
    optimizer = adamw(model)
    train(model, optimizer, [mine()] * 2, loss_of)
    model.eval()
    model(TOKENS)  # a forward pass alone leaves parameters gathered
    ts.save_sharded(model, Path(folder, "checkpoint"), optimizer=optimizer)
    ts.export(model, Path(folder, "whole.safetensors"))


def read_and_go_on(folder, expected):
    torch.manual_seed(99)
    model = split()
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ts.load_sharded(model, Path(folder, "checkpoint"), optimizer=optimizer)
    train(model, optimizer, [mine()] * 2, loss_of)
    all_close(ts.collect_state_dict(model, model.state_dict()), expected)


CHECKS = [
    training_and_clipping_are_those_of_the_whole_model,
    what_mixes_elements_is_refused,
    parameters_come_in_groups,
    optimizers_and_models_are_collected_and_relocated,
]


def join(name):
    dist.init_process_group("gloo")
    shape, names = MESHES[name]
    # Checks are pickled by value: what lives on from one to the next has to be in a module.
    d.mesh_of_this_test = init_device_mesh("cpu", shape, mesh_dim_names=names)
    d.init_process_group(d.mesh_of_this_test)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def on_mesh():
    """``on_mesh(name, check)`` runs a check on four ranks in a mesh."""
    pools = {}

    def run(name, check):
        if name not in pools:
            pools[name] = RankPool(4, setup=join, args=(name,))
        return pools[name].run(check)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    "mesh", ["2x2", *(pytest.param(n, marks=pytest.mark.nightly) for n in list(MESHES)[1:])]
)
def test_on_a_mesh(on_mesh, mesh, check):
    on_mesh(mesh, check)


def starts(on_mesh, on_ranks):
    """How checks run: on so many ranks without fully_shard, or on a mesh under it."""
    return lambda where, check: (
        check() if where == 1 else (on_mesh if isinstance(where, str) else on_ranks)(where, check)
    )


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        ("2x2", (1, "2x2")),
        ("2x2", (2, 3, 4)),
        (3, ("2x2", "2x1x2")),
        pytest.param("2x2x1", (1, "1x2x2"), marks=pytest.mark.nightly),
        pytest.param("1x2x2", (3, "2x2x1"), marks=pytest.mark.nightly),
    ],
)
def test_what_is_saved_is_resumed_on_any_number_of_ranks(on_mesh, on_ranks, tmp_path, writers, readers):
    start = starts(on_mesh, on_ranks)
    start(writers, functools.partial(train_and_write, str(tmp_path)))
    whole = plain()
    optimizer = adamw(whole)
    train(whole, optimizer, [TOKENS] * 2, loss_of)
    exported = load_file(tmp_path / "whole.safetensors")
    all_close({name: exported[name] for name in whole.state_dict()}, whole.state_dict())
    train(whole, optimizer, [TOKENS] * 2, loss_of)
    for where in readers:
        start(where, functools.partial(read_and_go_on, str(tmp_path), whole.state_dict()))


def a_mesh_that_mixes_shards_is_refused():
    tokens = d.mesh_of_this_test["tp"]
    with pytest.raises(ConfigError, match=r"fully_shard\(\) over the ranks .* would mix the shards of P"):
        fully_shard(split(cut=False).blocks[0].up, mesh=tokens)
    with pytest.raises(ConfigError, match=r"would mix the shards of a parameter of shape \(2, 4\)"):
        fully_shard(Own(), mesh=tokens)
    fully_shard(split(cut=False).blocks[0].norm, mesh=tokens)  # not split: any ranks may share it
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match=r"would save parts of .* in wrong places: .*ranks that ascend"):
        fully_shard(split(cut=False).blocks[0].up, mesh=backwards["dp"])


class Own(nn.Module):
    """A layer of a user's own: its marks are all that says that it is split."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0).reshape(2, 4) + 8 * d.get_rank())
        ts.register_parallel_attribute(self.weight, -1, size=4)

    def forward(self, x):
        return d.gather(F.linear(d.copy(x), self.weight))


def parameters_with_marks_of_ones_own_keep_them():
    model = fully_shard(Own(), mesh=d.mesh_of_this_test["dp"])
    (model(torch.ones(2, 4)).sum() / 2).backward()
    close(ts.clip_grad_norm_(model, 9.0), torch.tensor(4.0))
    state = ts.collect_state_dict(model, model.state_dict())
    assert torch.equal(state["weight"], torch.arange(16.0).reshape(4, 4))
    assert [g["name"] for g in ts.parameter_groups(model)] == ["sharded"]


def an_overflow_anywhere_leaves_the_step_out_everywhere():
    for late in (0, dist.get_world_size() - 1):
        model = split()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ts.GradScaler("cpu", init_scale=4.0)
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.scale(loss_of(model, mine())).backward()
        if dist.get_rank() == late:
            model.blocks[0].up.weight.grad.to_local()[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))


def gradients_that_differ_between_ranks_are_named():
    model = split()
    loss_of(model, mine()).backward()
    ts.check_gradients(model)
    model.blocks[1].norm.weight.grad.to_local().mul_(1 + d.get_rank())
    with pytest.raises(DisagreementError, match=r"gradients of blocks.1.norm.weight"):
        ts.check_gradients(model)


def files_of_the_whole_model_are_read(folder):
    whole = plain()
    with torch.no_grad():
        for p in whole.parameters():
            p.mul_(2)
    if dist.get_rank() == 0:
        save_file(dict(list(whole.state_dict().items())[:-1]), Path(folder, "model.safetensors"))
    dist.barrier()
    model = ts.load_pretrained(split(), folder)
    all_close(ts.collect_state_dict(model, model.state_dict()), whole.state_dict())
    with torch.device("meta"):
        model = Net().double()
    model = cut_over_data(ts.parallelize(model, PLAN))
    with pytest.raises(StateError, match=r"is a DTensor on the meta device: call model.to_empty"):
        ts.load_pretrained(model, folder)
    ts.load_pretrained(model.to_empty(device="cpu"), folder)
    all_close(ts.collect_state_dict(model, model.state_dict()), whole.state_dict())


def test_files_of_the_whole_model_are_read_under_fully_shard(on_mesh, tmp_path):
    on_mesh("2x2", functools.partial(files_of_the_whole_model_are_read, str(tmp_path)))


@pytest.mark.parametrize(
    "check",
    [
        a_mesh_that_mixes_shards_is_refused,
        parameters_with_marks_of_ones_own_keep_them,
        an_overflow_anywhere_leaves_the_step_out_everywhere,
        gradients_that_differ_between_ranks_are_named,
    ],
    ids=lambda c: c.__name__,
)
def test_on_two_by_two_ranks(on_mesh, check):
    on_mesh("2x2", check)
