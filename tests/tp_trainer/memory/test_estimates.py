"""What users see of a job's need of memory: `trainer.estimate`, `tp estimate`, errors where it ran out."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_trainer import MemoryTable, Trainer, estimate

from tests.reference_training import mean_square
from tests.run_tp import run

BUILDER = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "batch": torch.zeros(2, 512)}

def plain():
    return nn.Linear(4, 4)
"""


def test_every_backend_tells_what_it_needs_of_devices_that_are_not_there():
    model = nn.Linear(1000, 1000, device="meta")
    trainer = Trainer(devices="cpu")
    table = trainer.estimate(
        model,
        torch.optim.AdamW(model.parameters()),
        [torch.zeros(64, 1000)],
        mean_square,
        devices=8,
        memory="15MiB",
    )
    assert isinstance(table, MemoryTable)
    weights = 1001 * 1000 * 4
    ddp, fsdp = table.verdicts["ddp"], table.verdicts["fsdp"]
    assert (ddp.memory.weights, ddp.memory.gradients) == (weights, weights)
    assert fsdp.memory.weights == -(-weights // 8)
    assert not ddp.is_fit
    assert ddp.memory.free == 15 * 2**20
    assert "ddp" in str(table)
    assert "unfit" in str(table)
    assert trainer._preparation.current is None, "nothing was started"


def test_what_is_told_of_a_job_has_to_fit_together():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    trainer = Trainer(devices="cpu")
    with pytest.raises(ConfigError, match="none of the model's parameters"):
        trainer.estimate(model, torch.optim.SGD(other.parameters()))
    with pytest.raises(ConfigError, match="must be made first: SGD"):
        trainer.estimate(model, torch.optim.SGD)


def test_each_device_has_its_share_of_the_batch():
    model = nn.Linear(8, 8)
    trainer = Trainer(devices="cpu")
    whole, share = (
        trainer.estimate(model, None, [torch.zeros(64, 8)], mean_square, devices=n).footprint for n in (1, 8)
    )
    assert whole.batch == 8 * share.batch == 64 * 8 * 4


def test_a_batch_is_cut_or_repeated():
    seen = []

    def step(model, batch):
        seen.append((batch["x"].shape[0], batch["n"]))
        return model(batch["x"]).mean()

    for samples in (2, 5):
        estimate(nn.Linear(4, 4), None, {"x": torch.ones(3, 4), "n": 5}, step, samples=samples)
    assert sorted(set(seen)) == [(2, 5), (5, 5)]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GiB", 80 * 2**30), ("512 MiB", 2**29), ("24e9", 24 * 10**9), ("1.5GB", 15 * 10**8)],
)
def test_amounts_of_memory(text, nbytes):
    assert estimate(nn.Linear(1, 1), memory=text).free_nbytes == nbytes


def test_an_amount_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"written 80GiB, 512MiB or 24e9, got 'much'"):
        estimate(nn.Linear(1, 1), memory="much")


def test_the_command_prints_the_table_of_a_model_that_is_never_built(tmp_path, capsys):
    file = tmp_path / "big_model.py"
    file.write_text(BUILDER)
    arguments = ["estimate", f"{file}:build", "--devices", "8", "--memory", "80GiB", "--batch", "4", "--json"]
    assert run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 8
    assert found["free_bytes"] == 80 * 2**30
    (need,) = [layout["memory"] for layout in found["layouts"] if layout["backend"] == "ddp"]
    assert need["weights"] == 8 * (512 * 512 + 512) * 4
    assert abs(need["optimizer"] - 2 * need["weights"]) < 100
    assert need["activations"] > 4 * 512 * 4
    assert run(["estimate", f"{file}:build", "--json"]) == 0
    assert [layout["backend"] for layout in json.loads(capsys.readouterr().out)["layouts"]] == ["single"]


BROKEN = """
import torch

def model():
    return torch.nn.Linear(2, 2)

def broken():
    raise KeyError("width")

def nothing():
    pass

def of_another():
    return {"model": model(), "optimizer": torch.optim.SGD(model().parameters())}

def named():
    return {"model": model(), "optimizer": "SGD"}

def stepless():
    return {"model": model(), "step": 3}
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([":broken"], "raised KeyError: 'width' (line 8 of"),
        ([":brokn"], "has no function 'brokn'"),
        ([":nothing"], 'has to return a torch.nn.Module, or a dict with one as "model"; got NoneType'),
        ([":of_another"], "the optimizer has none of the model's parameters"),
        ([":named"], "optimizer must be a torch.optim.Optimizer, got str: 'SGD'"),
        ([":stepless"], "step must be a function step(model, batch) that returns the loss, got int: 3"),
        ([""], "a function is written file.py:build"),
        ([":model", "--memory", "lots"], "an amount of memory is written 80GiB"),
        ([":model", "--precision", "fp8"], "precision must be one of 'fp32'"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong_with_what_it_was_given(tmp_path, capsys, arguments, said):
    file = tmp_path / "odd_model.py"
    file.write_text(BROKEN)
    assert run(["estimate", f"{file}{arguments[0]}", *arguments[1:]]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_a_batch_the_command_says_how_activations_become_known(tmp_path, capsys):
    file = tmp_path / "plain_model.py"
    file.write_text(BROKEN)
    assert run(["estimate", f"{file}:model", "--memory", "1GiB"]) == 0
    assert 'where the builder returns {"model": model, "batch": batch}' in capsys.readouterr().out


def test_memory_that_ran_out_is_told_with_the_table_and_what_helps():
    def greedy(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Trainer(devices="cpu").fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=greedy)
    (note,) = [n for n in caught.value.__notes__ if n.startswith("Memory has run out")]
    assert "accumulate=" in note
    assert "backend 'single'" in note
    assert "trainer.estimate(" in note
