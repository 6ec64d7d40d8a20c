"""A rank's part of a big model is read straight out of safetensors files, and nothing else."""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
import tp_shard as ts
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tp_core.errors import StateError

d = ts.distributed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 12)
        self.norm = nn.BatchNorm1d(12)
        self.qkv, self.out = nn.Linear(12, 24), nn.Linear(16, 12)
        self.up, self.down = nn.Linear(12, 70), nn.Linear(70, 12)
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.table.weight


PLAN = {
    "table": ts.Vocab(),
    "head": ts.Vocab(),
    "qkv": ts.Column(heads=4, kv_heads=1, holds="qkv"),
    "out": ts.Row(heads=4, kv_heads=1),
    "up": ts.Column(),
    "down": ts.Row(),
}


def whole():
    torch.manual_seed(1)
    return Net()


def on_meta():
    with torch.device("meta"):
        model = Net()
    return ts.parallelize(model, PLAN)


def written(folder, *, files=2, dtype=torch.float32):
    """Write the whole model in some files with an index, as transformers does."""
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in whole().state_dict().items()}
    del state["head.weight"]  # tied
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(state)}
    for file in set(places.values()):
        save_file({n: state[n].contiguous() for n in state if places[n] == file}, Path(folder, file))
    if files > 1:
        Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return state


def equal(model, dtype=torch.float32):
    found, expected = ts.collect_state_dict(model, model.state_dict()), whole().state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        rounded = tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(found[name], rounded), name


def loads_into_memory_and_into_none(folder, dtype):
    model = ts.load_pretrained(on_meta(), folder)
    equal(model, dtype)
    assert model.head.weight is model.table.weight
    assert ts.parameter_groups(model)[0]["sharded"] == (d.get_world_size() > 1)
    equal(ts.load_pretrained(ts.parallelize(Net(), PLAN), folder), dtype)
    file = Path(folder, "model-0.safetensors")
    if not Path(folder, "model.safetensors.index.json").exists():
        equal(ts.load_pretrained(on_meta(), file), dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_without_memory_is_loaded(on_ranks, tmp_path, ranks):
    for files, dtype in [(3, torch.float32), (1, torch.bfloat16)]:
        folder = tmp_path / str(files)
        folder.mkdir()
        written(folder, files=files, dtype=dtype)
        check = functools.partial(loads_into_memory_and_into_none, str(folder), dtype)
        check() if ranks == 1 else on_ranks(ranks, check)


class Copies(TorchDispatchMode):
    """Count the bytes that are copied, and those of new memory."""

    def __init__(self):
        super().__init__()
        self.copied = self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name() == "aten::copy_":
            self.copied += result.nbytes
        elif isinstance(result, torch.Tensor) and func.name().startswith(("aten::empty", "aten::clone")):
            self.made += result.nbytes
        return result


def reads_its_own_slices_alone(folder):
    n = d.get_world_size()
    with torch.device("meta"):
        rows = ts.nn.ParallelLinear(64, 1024, bias=False, dim=-1)
        columns = ts.nn.ParallelLinear(1000 * n, 4, bias=False, dim=0)
    for name, layer in [("rows", rows), ("columns", columns)]:
        with Copies() as seen:
            ts.load_pretrained(layer, Path(folder, f"{name}.safetensors"))
        assert seen.copied == seen.made == layer.weight.nbytes  # out of the file into its place
        full = ts.collect_state_dict(layer, layer.state_dict())["weight"]
        assert torch.equal(full.flatten(), torch.arange(float(full.numel())))


def test_a_rank_reads_its_own_slices_alone(on_ranks, tmp_path):
    for name, shape in [("rows", (1024, 64)), ("columns", (4, 2000))]:
        weight = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        save_file({"weight": weight}, tmp_path / f"{name}.safetensors")
    on_ranks(2, functools.partial(reads_its_own_slices_alone, str(tmp_path)))


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path):
    state = written(tmp_path, files=1)
    file = tmp_path / "model-0.safetensors"
    model = Net()
    before = copy.deepcopy(model.state_dict())
    data = file.read_bytes()
    for change, error, message in [
        (
            lambda: save_file({"table.weight": torch.ones(2)}, file),
            StateError,
            r"'table.weight' of shape \(2,\)",
        ),
        (
            lambda: save_file({name: torch.ones(2) for name in "hgfedcba"}, file),
            StateError,
            r"lacks 'table.weight'; it has a, b, c, d, e \.\.\.",
        ),
        (lambda: save_file(state | {"b": torch.ones(2)}, file), StateError, "has 'b', which the model lacks"),
        (
            lambda: file.write_bytes(data[:-4]),
            StateError,
            "is damaged: .*not fully cover",
        ),
        (lambda: file.write_bytes(b"\xff" * 20), StateError, "is damaged: .*header"),
        (lambda: file.write_bytes(b"\2" + bytes(7) + b"[]"), StateError, "is damaged"),
        (file.unlink, FileNotFoundError, "no safetensors file at"),
    ]:
        change()
        with pytest.raises(error, match=message):
            ts.load_pretrained(model, tmp_path)
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    index = tmp_path / "model.safetensors.index.json"
    for places, message in [
        ({"a": "../x"}, r"names '\.\./x'"),
        ([], "index.json is damaged"),
        (3, "is damaged"),
    ]:
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(StateError, match=message):
            ts.load_pretrained(model, tmp_path)
    index.unlink()
    save_file(state | {"b": torch.ones(2)}, file)
    ts.load_pretrained(model, tmp_path, strict=False)
    save_file({f"net.{n}": t for n, t in state.items()}, file)
    equal(ts.load_pretrained(Net(), tmp_path, prefix="net."))
    save_file({"b": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(StateError, match="which the model lacks"):
        ts.load_pretrained(model, tmp_path, prefix="net.")
    save_file(state, tmp_path / "other.safetensors")
    save_file(state, file)
    with pytest.raises(StateError, match=r"'.*' is in two files: model-0.safetensors and other"):
        ts.load_pretrained(model, tmp_path)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("places", torch.arange(3), persistent=False)


def test_a_buffer_that_no_file_has_is_named(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = Positions()
    with pytest.raises(StateError, match="places is on the meta device and not part of the state"):
        ts.load_pretrained(model, tmp_path)
    model.places = torch.arange(3)
    assert torch.equal(ts.load_pretrained(model, tmp_path).weight, torch.ones(3))


def a_llama_of_transformers_is_loaded(folder, expected):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    ts.parallelize(model, LLAMA_PLAN)
    ts.load_pretrained(model, folder)
    torch.testing.assert_close(model.eval()(torch.arange(10).reshape(2, 5)).logits, expected)


LLAMA_PLAN = {
    "model.layers.*.self_attn.q_proj": ts.Column(heads=4, kv_heads=2),
    "model.layers.*.self_attn.[kv]_proj": ts.Column(heads=4, kv_heads=2, holds="kv"),
    "model.layers.*.self_attn.o_proj": ts.Row(heads=4, kv_heads=2),
    "model.layers.*.mlp.gate_proj": ts.Column(),
    "model.layers.*.mlp.up_proj": ts.Column(),
    "model.layers.*.mlp.down_proj": ts.Row(),
}


@pytest.mark.slow
def test_a_llama_of_transformers_is_loaded(on_ranks, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 37, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = model(torch.arange(10).reshape(2, 5)).logits
    on_ranks(2, functools.partial(a_llama_of_transformers_is_loaded, str(tmp_path), expected))
