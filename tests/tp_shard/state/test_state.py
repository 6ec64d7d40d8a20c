"""Whole states out of shards, on any number of ranks, and back; wrong ones name what is wrong."""

import copy
import functools
import inspect
import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from tp_core.errors import ConfigError, ModelError, StateError

d = ts.distributed
Linear, Embedding = ts.nn.ParallelLinear, ts.nn.ParallelEmbedding


class Net(nn.Module):
    def __init__(self, table=nn.Embedding, linear=nn.Linear, split=False):
        super().__init__()
        self.table = table(11, 6, **({"dim": 0} if split else {}))
        self.norm = nn.BatchNorm1d(6)
        self.up = linear(6, 9, **({"dim": 1} if split else {}))
        self.down = linear(9, 6, **({"dim": 0} if split else {}))
        self.head = linear(6, 11, bias=False, **({"dim": -1, "gather_output": True} if split else {}))
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.down(self.up(self.norm(self.table(tokens))).relu()))


def pair():
    """A plain model, and a split one with the same values."""
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3)
    return plain, Net(Embedding, Linear, split=True)


def equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


TOKENS = torch.tensor([1, 10, 3, 3])


def a_collected_state_is_that_of_the_plain_model():
    plain, model = pair()
    expected = plain.state_dict()
    whole = ts.collect_state_dict(model, model.state_dict())
    equal(whole, expected)
    assert whole._metadata == model.state_dict()._metadata
    assert whole["head.weight"].data_ptr() == whole["table.weight"].data_ptr()
    assert list(ts.collect_state_dict(model, model.state_dict(), prefix="net.")) == [
        f"net.{n}" for n in expected
    ]
    kept = ts.collect_state_dict(model, model.state_dict(keep_vars=True))
    equal(kept, expected)
    assert kept["norm.weight"] is model.norm.weight  # what is not split is handed on
    first = ts.collect_state_dict(model, model.state_dict(), to="rank0")
    if not dist.is_initialized() or dist.get_rank() == 0:
        equal(first, expected)
    else:
        assert first == {}
    with pytest.raises(ConfigError, match="got 'rank1'"):
        ts.collect_state_dict(model, model.state_dict(), to="rank1")
    with pytest.raises(ModelError, match=r"must be a torch.nn.Module, got dict"):
        ts.collect_state_dict({}, {})


def a_whole_state_is_relocated():
    plain, model = pair()
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    placed = ts.relocate_state_dict(model, other.state_dict())
    for name in ("up.weight", "down.weight", "table.weight"):
        assert placed[name].untyped_storage().nbytes() == placed[name].numel() * 4
    assert list(ts.relocate_state_dict(model, other.state_dict(), prefix="a.")) == [f"a.{n}" for n in placed]
    model.load_state_dict(placed)
    equal(ts.collect_state_dict(model, model.state_dict()), other.state_dict())
    before = copy.deepcopy(model.state_dict())
    wrong = other.state_dict() | {"down.weight": torch.ones(5, 9)}
    if d.get_world_size() > 1:
        with pytest.raises(StateError, match=r"down.weight has shape \(5, 9\).*\(6, 9\)"):
            ts.relocate_state_dict(model, wrong)
        with pytest.raises(StateError, match=r"table.weight has shape"):
            ts.relocate_state_dict(model, model.state_dict())  # shards, not the whole
        with pytest.raises(StateError, match=r"table.weight has shape"):
            ts.collect_state_dict(model, other.state_dict())  # the whole, not shards
    equal(model.state_dict(), before)


def the_cases_of_the_manual(folder):
    rank = d.get_rank()
    for dim in (-1, 1, 0, None):
        m = Linear(20, 30, dim=dim)
        state_dict = ts.collect_state_dict(m, m.state_dict())
        assert state_dict["weight"].shape == (30, 20)
        file = Path(folder, f"{dim}-{rank}.pt")
        torch.save({"state_dict": state_dict}, file)
        assert file.stat().st_size < 5000
        fresh = Linear(20, 30, dim=dim)
        fresh.load_state_dict(ts.relocate_state_dict(fresh, torch.load(file)["state_dict"]))
        assert torch.equal(fresh.weight, m.weight)
        torch.save(m.state_dict(), file)  # and a shard's own file holds a shard
        assert torch.load(file)["weight"].untyped_storage().nbytes() == m.weight.numel() * 4
    same = Linear(20, 30, dim=None)
    one, two = ts.collect_state_dict(same, same.state_dict(keep_vars=True)), same.state_dict(keep_vars=True)
    assert all(one[k] is two[k] for k in two)


def custom_layers_with_marks_are_collected():
    n, rank = d.get_world_size(), d.get_rank()
    full = torch.arange(36.0).reshape(9, 4)
    module = nn.Module()
    module.a = nn.Parameter(ts.slice(full, n, 0)[rank].clone())
    module.b = nn.Parameter(ts.slice(full, n, 0)[rank].clone())
    ts.register_parallel_attribute(module.a, -1, 0, size=9)
    ts.register_parallel_attribute(module.b, 0, 1, size=9)
    state = ts.collect_state_dict(module, module.state_dict())
    assert torch.equal(state["a"], full)
    assert torch.equal(state["b"], full)


def optimizers_are_collected_and_relocated():
    plain, model = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for m, optimizer in zip((plain, model), optimizers, strict=True):
        m(TOKENS).square().mean().backward()
        optimizer.step()
    whole = ts.collect_optimizer_state_dict(model, optimizers[1])
    expected = optimizers[0].state_dict()
    assert whole["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(whole["state"][index][key], value, rtol=1e-4, atol=1e-7)
    fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    fresh.load_state_dict(ts.relocate_optimizer_state_dict(model, fresh, whole))
    for index, entries in optimizers[1].state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(fresh.state_dict()["state"][index][key], value)
    with pytest.raises(ConfigError, match="got 'rank1'"):
        ts.collect_optimizer_state_dict(model, fresh, to="rank1")
    first = ts.collect_optimizer_state_dict(model, fresh, to="rank0")
    assert bool(first) == (not dist.is_initialized() or dist.get_rank() == 0)
    with pytest.raises(ModelError, match=r"shape \(3,\) that is not the model's"):
        ts.collect_optimizer_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(3))]))
    whole["state"][0]["exp_avg"] = torch.ones(2, 2)
    if d.get_world_size() > 1:
        with pytest.raises(StateError, match=r"table.weight.exp_avg has shape \(2, 2\)"):
            ts.relocate_optimizer_state_dict(model, fresh, whole)


CHECKS = [
    a_collected_state_is_that_of_the_plain_model,
    a_whole_state_is_relocated,
    custom_layers_with_marks_are_collected,
    optimizers_are_collected_and_relocated,
]


def trained():
    _, model = pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    return model, optimizer


def write(folder):
    model, optimizer = trained()
    ts.save_sharded(model, Path(folder, "ckpt"), optimizer=optimizer)
    ts.export(model, Path(folder, "whole.safetensors"), prefix="net.")
    return ts.collect_state_dict(model, model.state_dict()), ts.collect_optimizer_state_dict(model, optimizer)


def read(folder, expected):
    torch.manual_seed(99)
    model = Net(Embedding, Linear, split=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ts.load_sharded(model, Path(folder, "ckpt"), optimizer=optimizer)
    state, optimizer_state = expected
    equal(ts.collect_state_dict(model, model.state_dict()), state)
    found = ts.collect_optimizer_state_dict(model, optimizer)
    assert found["param_groups"] == optimizer_state["param_groups"]
    for index, entries in optimizer_state["state"].items():
        for key, value in entries.items():
            assert torch.equal(found["state"][index][key], value)


def damaged(folder):
    """Every wrong checkpoint is an error that names the key, on every rank, and changes nothing."""
    folder = Path(folder, "ckpt")
    torch.manual_seed(99)
    model = Net(Embedding, Linear, split=True)
    before = copy.deepcopy(model.state_dict())
    model.extra = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"lacks 'model\.extra\.weight'"):
        ts.load_sharded(model, folder)
    del model.extra
    model.down = Linear(9, 5, dim=0)
    with pytest.raises(StateError, match=r"'model\.down\.weight' of shape \(6, 9\), not \(5, 9\)"):
        ts.load_sharded(model, folder)
    model.down = Linear(9, 6, dim=0)
    before |= {f"down.{k}": v.clone() for k, v in model.down.state_dict().items()}
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        ts.load_sharded(model, folder / "not")
    if dist.is_initialized():
        dist.barrier()
    file = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    digests, written = folder / "digests.json", file.read_bytes()
    for change, message in [
        (
            lambda: file.write_bytes(written[:-100]),
            r"ckpt is damaged: __\d_0.safetensors has \d+ bytes of \d+",
        ),
        (
            lambda: file.write_bytes(written[:200] + bytes([written[200] ^ 1]) + written[201:]),
            r"ckpt is damaged: __\d_0.safetensors is not what was written",
        ),
        (lambda: digests.write_text("["), "digests.json is damaged"),
        (digests.unlink, r"has no digests.json: ts.save_sharded\(\) was ended before its"),
    ]:
        if d.get_rank() == 0:
            change()
        if dist.is_initialized():
            dist.barrier()
        with pytest.raises(StateError, match=message):
            ts.load_sharded(model, folder)
    equal(model.state_dict(), before)


def read_safetensors(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert (8 + size) % 8 == 0
    assert header.pop("__metadata__")["format"] == "pt"
    types = {"F32": torch.float32, "I64": torch.int64}
    result = {}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        raw = bytearray(data[8 + size + a : 8 + size + b])
        result[name] = torch.frombuffer(raw, dtype=types[entry["dtype"]]).reshape(entry["shape"])
    return result


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 1), (2, 1)])
def test_sharded_checkpoints_are_read_by_any_number_of_ranks(on_ranks, tmp_path, writers, readers):
    def start(n, check, *args):
        if n == 1:
            return check(*args)
        return on_ranks(n, functools.partial(check, *args))[0]

    expected = start(writers, write, str(tmp_path))
    equal({f"net.{k}": v for k, v in expected[0].items()}, read_safetensors(tmp_path / "whole.safetensors"))
    start(readers, read, str(tmp_path), expected)
    if (writers, readers) in [(2, 1), (1, 2)]:
        start(readers, damaged, str(tmp_path))


@pytest.mark.parametrize("check", [*CHECKS, the_cases_of_the_manual], ids=lambda c: c.__name__)
def test_without_a_process_group(check, tmp_path):
    check(*([str(tmp_path)] if check is the_cases_of_the_manual else []))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_on_ranks(on_ranks, world, check):
    on_ranks(world, check)


@pytest.mark.parametrize("world", [2, 4])
def test_the_cases_of_the_manual_on_ranks(on_ranks, world, tmp_path):
    on_ranks(world, functools.partial(the_cases_of_the_manual, str(tmp_path)))


def under_two_copies_and_ddp():
    plain, model = pair()
    equal(
        ts.collect_state_dict(model, model.state_dict(), to="rank0"),
        plain.state_dict() if dist.get_rank() == 0 else {},
    )
    ddp = DistributedDataParallel(model, process_group=d.get_data_group())
    wrapped = ts.collect_state_dict(ddp, ddp.state_dict())
    equal(wrapped, {f"module.{k}": v for k, v in plain.state_dict().items()})
    # The prefix may be on the state, on the model, on both or on none.
    equal(ts.collect_state_dict(model, ddp.state_dict()), wrapped)
    for target, state in [(ddp, wrapped), (ddp, plain.state_dict()), (model, wrapped)]:
        placed = ts.relocate_state_dict(target, state)
        assert placed["module.up.weight" if state is wrapped else "up.weight"].shape == model.up.weight.shape
    whole = ts.collect_state_dict(ddp, ddp.module.state_dict(), to="rank0")
    if dist.get_rank() == 0:
        equal(whole, plain.state_dict())


def test_states_under_two_copies_of_the_model_and_ddp(on_ranks):
    on_ranks(4, under_two_copies_and_ddp, group_size=2)


def test_an_export_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        ts.export(nn.Linear(2, 2), tmp_path / "no" / "file.safetensors")
    with pytest.raises(StateError, match=r"weight has type torch.complex128"):
        ts.export(nn.Linear(2, 2, dtype=torch.complex128), tmp_path / "file.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_every_type_is_exported(tmp_path):
    module = nn.Module()
    for i, dtype in enumerate([torch.bool, torch.bfloat16, torch.float16, torch.uint8, torch.float64]):
        module.register_buffer(f"b{i}", torch.ones(3, dtype=dtype))
    module.register_buffer("empty", torch.ones(0, 4))
    module.register_buffer("scalar", torch.tensor(7))
    ts.export(module, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert [header[f"b{i}"]["dtype"] for i in range(5)] == ["BOOL", "BF16", "F16", "U8", "F64"]
    assert header["empty"]["shape"] == [0, 4]
    assert header["scalar"]["shape"] == []
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert len(data) == 8 + int.from_bytes(data[:8], "little") + max(ends)


def test_deepcopies_and_pickles_keep_what_collecting_needs():
    layer = copy.deepcopy(Linear(4, 4, dim=1))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert again.splits.keys() == {"weight", "bias"}
    assert ts.get_parallel_dim(again.weight) == 1


class Factored(torch.optim.Optimizer):
    """Keeps a row's worth of state of each matrix: nobody could say how it is cut."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.zeros(p.shape[0] + 1)


def an_optimizer_that_keeps_other_shapes_is_refused():
    layer = Linear(8, 8, bias=False, dim=1)
    optimizer = Factored(layer.parameters())
    optimizer.step()
    with pytest.raises(
        StateError, match=r"keeps row of shape \(5,\) of weight.*how it would be cut is not known"
    ):
        ts.collect_optimizer_state_dict(layer, optimizer)


def test_an_optimizers_state_of_other_shapes_is_refused(on_ranks):
    on_ranks(2, an_optimizer_that_keeps_other_shapes_is_refused)


class WithNotes(nn.Linear):
    def get_extra_state(self):
        return {"note": 1}

    def set_extra_state(self, state):
        self.note = state


def test_what_a_sharded_checkpoint_cannot_hold_or_lacks_is_named(tmp_path):
    with pytest.raises(StateError, match="has '_extra_state', a dict; a checkpoint holds tensors"):
        ts.save_sharded(WithNotes(2, 2), tmp_path / "notes")
    model = nn.Linear(2, 2)
    ts.save_sharded(model, tmp_path / "plain")
    with pytest.raises(StateError, match=r"has no state of an optimizer: it lacks optimizer.values"):
        ts.load_sharded(model, tmp_path / "plain", optimizer=torch.optim.Adam(model.parameters()))
    two = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    for p in two.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    ts.save_sharded(two, tmp_path / "two", optimizer=optimizer)
    one = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(StateError, match=r"has 'b\.bias', which the model lacks"):
        ts.load_sharded(one, tmp_path / "two", optimizer=torch.optim.SGD(one.parameters(), lr=0.1))
    (tmp_path / "plain" / "index.json").write_bytes(b"nonsense")
    with pytest.raises(StateError, match=r"damaged: index\.json has 8 bytes"):
        ts.load_sharded(model, tmp_path / "plain")
    (tmp_path / "file").write_text("in the way")
    inner = next((tmp_path / "two").glob("*.safetensors"))
    inner.write_bytes(bytes(inner.stat().st_size))  # as long as it was, and nothing in it
    with pytest.raises(StateError, match="is not what was written"):
        ts.load_sharded(two, tmp_path / "two")
    with pytest.raises(FileExistsError, match="file"):
        ts.save_sharded(model, tmp_path / "file")


def cannot_be_written_by_rank_0(folder):
    layer = Linear(4, 4, dim=1)
    error = FileNotFoundError if dist.get_rank() == 0 else OSError
    with pytest.raises(error, match="there is no folder"):
        ts.export(layer, Path(folder, "no", "file.safetensors"))
    assert torch.equal(d.reduce(torch.ones(1)), torch.full((1,), 2.0))  # and all go on


def test_all_ranks_learn_that_rank_0_could_not_write(on_ranks, tmp_path):
    on_ranks(2, functools.partial(cannot_be_written_by_rank_0, str(tmp_path)))


def on_a_mesh(folder, ranks, names=("dp", "tp")):
    """Whole states, files and checkpoints on 4 ranks in this mesh are those of the plain model."""
    d.destroy_process_group()
    d.init_process_group(DeviceMesh("cpu", ranks, mesh_dim_names=names))
    plain, model = pair()
    stage = dist.get_rank() // 2 if names[0] == "pp" else 0
    is_first = dist.get_rank() == 2 * stage
    equal(
        ts.collect_state_dict(model, model.state_dict(), to="rank0"), plain.state_dict() if is_first else {}
    )
    equal(ts.collect_state_dict(model, model.state_dict()), plain.state_dict())
    file = Path(folder, f"{stage}.safetensors")
    ts.export(model, file, prefix="net.")
    equal(read_safetensors(file), {f"net.{k}": v for k, v in plain.state_dict().items()})
    torch.manual_seed(99)
    other = ts.load_pretrained(Net(Embedding, Linear, split=True), file, prefix="net.")
    equal(other.state_dict(), model.state_dict())
    if names[0] != "pp":  # a checkpoint is of one model, on all ranks
        read(folder, write(folder))
        assert bool(ts.collect_optimizer_state_dict(*trained(), to="rank0")) == is_first
    d.destroy_process_group()
    d.init_process_group()


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ([[0, 1], [2, 3]], ("pp", "tp")),
        pytest.param([[3, 2], [1, 0]], ("dp", "tp"), marks=pytest.mark.slow),
        pytest.param([[0, 2], [1, 3]], ("dp", "tp"), marks=pytest.mark.slow),
        pytest.param([[3, 1], [2, 0]], ("tp", "dp"), marks=pytest.mark.slow),
    ],
)
def test_states_and_files_on_a_mesh_in_any_order_of_ranks(on_ranks, tmp_path, ranks, names):
    on_ranks(4, functools.partial(on_a_mesh, str(tmp_path), ranks, names))


def in_groups_with_rank_0_last():
    options = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    groups = [dist.new_group(ranks, **options) for ranks in ([1, 0], [3, 2])]
    torch.manual_seed(3)
    layer = Linear(6, 9, dim=1, group=groups[dist.get_rank() // 2])
    torch.manual_seed(3)
    plain = nn.Linear(6, 9)
    state = ts.collect_state_dict(layer, layer.state_dict(), to="rank0")
    equal(state, plain.state_dict() if dist.get_rank() == 0 else {})


def test_rank_0_collects_the_state_wherever_it_stands_in_its_group(on_ranks):
    on_ranks(4, in_groups_with_rank_0_last)
