"""``tp convert``: the model of any checkpoint as safetensors."""

import json
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from tp_core.errors import ConfigError, StateError
from tp_core.state import StoredTensors, TensorInfo, write_tensors
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer, convert, find_checkpoint
from tp_trainer._convert import write_model  # private: a source that counts what is in memory, or fails

from tests.models import perceptron
from tests.run_tp import run
from tests.tp_trainer.small_run import leave, train

MIB = 2**20


def committed(folder):
    return sorted(Path(folder).glob("step-*"), reverse=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, which keeps three checkpoints, and the weights at its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train(folder)


def weights(path):
    return list(load_file(path).values())


def same(path, expected):
    found = load_file(path)
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    return sorted(found) == sorted(names) and all(
        torch.equal(found[name], tensor) for name, tensor in zip(names, expected, strict=True)
    )


def test_the_newest_checkpoint_of_a_run_becomes_a_file(finished, tmp_path, capsys):
    folder, expected = finished
    out = tmp_path / "out" / "model.safetensors"
    assert run(["convert", str(folder), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert same(out, expected)


def test_a_program_converts_too_and_replaces_what_it_was_told_to(finished, tmp_path):
    folder, expected = finished
    out = tmp_path / "model.safetensors"
    for source in (folder, find_checkpoint(folder)):
        assert convert(source, out, max_file_nbytes="1GB", overwrite=source != folder) == [out]
        assert same(out, expected)
        with pytest.raises(ConfigError, match="is there already; overwrite=True, or --ov"):
            convert(source, tmp_path)


def test_a_folder_gets_the_usual_name_and_json_says_what_was_read(finished, tmp_path, capsys):
    folder, expected = finished
    assert run(["convert", str(folder), str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"] == str(committed(folder)[0])
    assert report["files"] == [str(tmp_path / "model.safetensors")]
    assert same(tmp_path / "model.safetensors", expected)


def test_a_step_and_the_best_can_be_chosen(finished, tmp_path, capsys):
    folder, _ = finished
    steps = [int(path.name.removeprefix("step-")) for path in committed(folder)]
    out = tmp_path / "one.safetensors"
    assert run(["convert", str(folder), str(out), "--step", str(steps[-1])]) == 0
    assert f"from {folder}/step-{steps[-1]:010d}" in capsys.readouterr().err
    # The metric is known after an epoch; the last of two is the only checkpoint that has the second's.
    assert run(["convert", str(folder), str(tmp_path / "best"), "--best", "loss"]) == 0
    assert "step-" in capsys.readouterr().err
    assert run(["convert", str(folder), str(tmp_path / "x"), "--step", "4711"]) == 2
    assert f"it has {steps[0]}, " in capsys.readouterr().err
    assert run(["convert", str(folder), str(tmp_path / "x"), "--best", "los"]) == 2
    assert "no checkpoint has the metric 'los'; they have loss" in capsys.readouterr().err


def test_several_files_with_an_index_are_what_hugging_face_has(finished, tmp_path):
    folder, expected = finished
    out = tmp_path / "model.safetensors"
    assert run(["convert", str(folder), str(out), "--max-shard-size", "50"]) == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {tmp_path / name for name in index["weight_map"].values()}
    assert len(files) > 1
    assert not out.exists()
    # And back into one file: weights are converted, too.
    again = tmp_path / "again" / "model.safetensors"
    assert run(["convert", str(tmp_path / "model.safetensors.index.json"), str(again)]) == 0
    assert same(again, expected)
    # Replacing them leaves nothing of the old ones.
    assert run(["convert", str(folder), str(out)]) == 2
    assert run(["convert", str(folder), str(out), "--overwrite"]) == 0
    assert sorted(p.name for p in tmp_path.glob("*.safetensors*")) == ["model.safetensors"]
    assert same(out, expected)


def test_a_file_of_save_model_is_read(tmp_path):
    model = nn.Linear(3, 2)
    with Trainer(progress=False, devices="cpu") as trainer:
        trainer.save_model(model, tmp_path / "model.pt")
    assert run(["convert", str(tmp_path / "model.pt"), str(tmp_path / "m.safetensors")]) == 0
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["weight"], model.weight)


def sharded_checkpoint(folder):
    model = perceptron(4, 6, 3, seed=0, dtype=torch.float32)
    with Trainer(backend="fsdp", devices=["cpu"] * 2, seed=0, progress=False) as trainer:
        data = [(torch.ones(2, 4), torch.ones(2, 3))] * 2
        trainer.fit(
            model,
            torch.optim.Adam(model.parameters()),
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data[0]), batch_size=2),
            step=lambda m, batch: (m(batch[0]) - batch[1]).square().mean(),
            checkpoint=Checkpoints(folder),
        )
        trainer.export(model, Path(folder).with_name("expected.safetensors"))


@pytest.mark.slow
def test_what_ranks_have_split_is_one_file(tmp_path):
    run_ranks(sharded_checkpoint, 2, str(tmp_path / "run"), timeout_s=800.0)
    (checkpoint,) = committed(tmp_path / "run")
    assert (checkpoint / "tensors" / "index.json").is_file()
    out = tmp_path / "model.safetensors"
    assert run(["convert", str(checkpoint), str(out)]) == 0
    expected, found = load_file(tmp_path / "expected.safetensors"), load_file(out)
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_several_models_are_told_apart(tmp_path, capsys):
    tensors = {f"model.{who}.weight": torch.full((2,), value) for who, value in (("g", 1.0), ("d", 2.0))}
    write_tensors(tensors, tmp_path / "both")
    assert not dist.is_initialized()
    assert run(["convert", str(tmp_path / "both"), str(tmp_path / "d.safetensors"), "--model", "d"]) == 0
    assert torch.equal(load_file(tmp_path / "d.safetensors")["weight"], torch.full((2,), 2.0))
    assert run(["convert", str(tmp_path / "both"), str(tmp_path / "x.safetensors"), "--model", "h"]) == 2
    assert "has no model 'h'; the names in it begin with ['d', 'g']" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "d.safetensors"), str(tmp_path / "y"), "--model", "d"]) == 2
    assert "has one model" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_and_nothing_is_moved_or_written(tmp_path, capsys):
    leave(tmp_path / "run", 3)
    newest = committed(tmp_path / "run")[0]
    os.truncate(newest / "tensors.pt", 100)
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "out.safetensors")]) == 1
    err = capsys.readouterr().err
    assert f"tp convert: checkpoint {newest} is damaged: tensors.pt has 100 bytes of" in err
    assert newest.is_dir()
    assert not (tmp_path / "out.safetensors").exists()
    with (newest / "manifest.json").open("a") as file:
        file.write(" ")
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "o"), "--best", "loss"]) == 1
    assert "manifest.json is not what was written" in capsys.readouterr().err


def test_wrong_requests_are_sentences(finished, tmp_path, capsys):
    folder = str(finished[0])
    (tmp_path / "empty").mkdir()
    write_tensors({"other": torch.ones(1)}, tmp_path / "other")
    torch.save({"a": torch.ones(1), "n": 3}, tmp_path / "mixed.pt")
    wrong = {
        (str(tmp_path / "nowhere"), "o"): (1, "there is no checkpoint at"),
        (str(tmp_path / "empty"), "o"): (1, "has no checkpoint: neither step-"),
        (str(tmp_path / "empty"), "o", "--step", "3"): (2, "is not the folder of a run"),
        (str(tmp_path / "other"), "o"): (1, "has no model: no name begins with 'model.'; it has ['other']"),
        (str(tmp_path / "mixed.pt"), "o"): (1, "holds 'n', which is int and not a tensor"),
        (folder, "model.pt"): (2, "the name ends in .safetensors, got 'model.pt'"),
        (folder, "o", "--ranks", "4"): (2, "on any number, whatever number wrote it"),
        (folder, "o", "--step", "3", "--best", "loss"): (2, "give one of them"),
        (folder, "o", "--max-shard-size", "big"): (2, "got 'big'"),
    }
    for arguments, (status, said) in wrong.items():
        assert run(["convert", *arguments]) == status, arguments
        captured = capsys.readouterr()
        assert said in captured.err
        assert captured.out == ""
        assert not Path("o").exists()


def test_a_type_that_safetensors_lack_is_refused(tmp_path):
    write_tensors({"model.q": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "odd")
    assert run(["convert", str(tmp_path / "odd"), str(tmp_path / "o.safetensors")]) == 1


class ManyTensors(StoredTensors):
    """32 tensors of 1 MiB, of which it is known how many are alive."""

    path = Path("many")
    infos = {f"model.{i}": TensorInfo((MIB // 4,), torch.float32) for i in range(32)}

    def __init__(self):
        self.alive = self.most = 0

    def fill(self, targets):
        for name, target in targets.items():
            target.fill_(int(name.removeprefix("model.")))
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(target, self._free)

    def _free(self):
        self.alive -= 1


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    stored = ManyTensors()
    (file,) = write_model(stored, tmp_path / "m.safetensors")
    assert (stored.most, stored.alive) == (2, 0)  # the next one is read before the one on its way is let go
    assert load_file(file)["17"].unique().tolist() == [17.0]


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    class Failing(ManyTensors):
        def fill(self, targets):
            msg = "the disk is gone"
            raise StateError(msg)

    out = tmp_path / "m.safetensors"
    out.write_bytes(b"old")
    with pytest.raises(StateError, match="the disk is gone"):
        write_model(Failing(), out)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
