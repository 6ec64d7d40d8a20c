"""Weights in one file or several, written and read tensor by tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tp_core.errors import ConfigError, StateError
from tp_testing import run_ranks
from tp_trainer import Trainer

SIZES = [2, 7, 3]


class Net(nn.Module):
    """Has elements of one, two, four and eight bytes, a scalar, and a tensor without elements."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(5, size) for size in SIZES)
        self.low = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.tied = self.layers[0]


def export(folder, max_file_nbytes, backend="auto"):
    with Trainer(backend=backend, devices="cpu", progress=False) as trainer:
        model = trainer.prepare(Net())
        trainer.export(model, folder / "model.safetensors", max_file_nbytes=max_file_nbytes)
        other = trainer.prepare(Net(seed=1))
        for path in (folder, next(folder.glob("*.index.json"), folder / "model.safetensors")):
            if path.is_dir() and not list(folder.glob("*.index.json")):
                continue
            trainer.load_model(other, path)
            yield {n: t.clone() for n, t in trainer.session.model_state(other).items()}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def whole(folder):
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.mark.parametrize("limit", [None, 10**9, 200, 1])
def test_weights_come_back_from_one_file_or_several(tmp_path, limit):
    expected = Net().state_dict()
    for found in export(tmp_path, limit):
        assert_same(found, expected)
    assert_same({n: whole(tmp_path)[n] for n in expected}, expected)


def test_several_files_have_an_index_as_other_libraries_have_it(tmp_path):
    list(export(tmp_path, 200))
    names = sorted(path.name for path in tmp_path.iterdir())
    total = len(names) - 1
    assert names[:-1] == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert names[-1] == "model.safetensors.index.json"
    assert {*index["weight_map"]} == {*Net().state_dict()}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    sizes = {n: t.nbytes for n, t in whole(tmp_path).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_an_older_file_does_not_hide_the_index(tmp_path):
    list(export(tmp_path, None))
    list(export(tmp_path, 200))
    assert not (tmp_path / "model.safetensors").exists()


def test_several_files_need_the_usual_name(tmp_path):
    with Trainer(devices="cpu", progress=False) as trainer:
        model = trainer.prepare(Net())
        with pytest.raises(ConfigError, match=r"the name ends in \.safetensors, got '.*model\.bin'"):
            trainer.export(model, tmp_path / "model.bin", max_file_nbytes=1)


def load(path):
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.load_model(Net(), path)


def test_weights_of_another_model_are_refused(tmp_path):
    state = {n: t.clone() for n, t in Net().state_dict().items()}
    state["layers.1.bias"] = torch.zeros(2)
    del state["low"]
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(StateError, match=r"it has layers\.1\.bias of shape \(2,\), not \(7,\); it lacks low"):
        load(tmp_path / "other.safetensors")


def test_damaged_weights_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"12345678{}")
    with pytest.raises(StateError, match=r"model\.safetensors is damaged"):
        load(path)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": {"low": "../low.safetensors"}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(StateError, match=r"index\.json is damaged"):
        load(path)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(tmp_path / "model.safetensors")


def export_on_ranks(folder, backend):
    return list(export(folder, 100, backend))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_ranks_write_and_read_them_together(tmp_path, backend):
    expected = Net().state_dict()
    for states in run_ranks(export_on_ranks, 2, tmp_path, backend):
        for found in states:
            assert_same(found, expected)
    assert_same({n: whole(tmp_path)[n] for n in expected}, expected)


def fail_in_the_middle(folder):
    """Return what each rank is told when the second of many files cannot be written."""
    with Trainer(backend="fsdp", devices="cpu", progress=False) as trainer:
        model = trainer.prepare(Net())
        if trainer.is_main:
            (folder / "model-00002-of-00012.safetensors").mkdir()
        trainer.session.barrier()
        with pytest.raises(OSError, match="is a folder") as caught:
            trainer.export(model, folder / "model.safetensors", max_file_nbytes=1)
        trainer.session.barrier()
        return str(caught.value), (folder / "model.safetensors.index.json").exists()


@pytest.mark.slow
def test_a_failure_between_two_files_is_told_on_all_ranks(tmp_path):
    for message, has_index in run_ranks(fail_in_the_middle, 2, tmp_path):
        assert "model" in message
        assert not has_index
