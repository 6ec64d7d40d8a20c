"""Predictions come in the order of the data, each sample once, on every backend."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_trainer import Trainer

SAMPLES = 35


def data():
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))


def loader(samples=SAMPLES, batch_size=2):
    return DataLoader(TensorDataset(data()[:samples]), batch_size=batch_size)


def step(model, batch):
    logits = model(batch[0])
    return {"class": logits.argmax(1), "logits": logits, "name": [f"{row[0]:.3f}" for row in batch[0]]}


def expected():
    with torch.no_grad():
        return step(network().eval(), (data(),))


def check(found):
    wanted = expected()
    assert found["name"] == wanted["name"]
    assert torch.equal(found["class"], wanted["class"])
    torch.testing.assert_close(found["logits"], wanted["logits"])


BACKENDS = [
    pytest.param({"backend": "single", "devices": "cpu"}, id="single"),
    pytest.param({"backend": "tuple", "devices": ["cpu"] * 3}, id="tuple"),
    pytest.param({"backend": "dp-gather", "devices": ["cpu"] * 2}, id="dp-gather"),
]


@pytest.mark.parametrize("options", BACKENDS)
def test_predictions_are_those_of_one_device(options):
    model = network()
    with Trainer(**options, seed=0, progress=False) as trainer:
        predictions = trainer.predict(model, loader(), step)
        check(predictions.collect())
        for piece in predictions:
            assert not piece["logits"].requires_grad
            assert torch.is_grad_enabled()
    assert model.training


def on_a_rank(folder):
    with Trainer(backend="ddp", devices="cpu", seed=0, progress=False) as trainer:
        predictions = trainer.predict(network(), loader(), step)
        check(predictions.collect())
        predictions.save(folder / "all.jsonl")
        trainer.predict(network(), loader(), lambda m, b: m(b[0])).save(folder / "all.safetensors")
        with pytest.raises(OSError, match="missing"):
            predictions.save(folder / "missing" / "all.jsonl")
        trainer.session.barrier()


def test_predictions_over_ranks_are_those_of_one_device(two_ranks, tmp_path):
    two_ranks.run(on_a_rank, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    wanted = expected()
    assert [row["name"] for row in rows] == wanted["name"]
    assert [row["class"] for row in rows] == wanted["class"].tolist()
    torch.testing.assert_close(load_file(tmp_path / "all.safetensors")["predictions"], wanted["logits"])


def test_predictions_of_a_model_leave_training_as_it_was():
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        model = trainer.prepare(network())
        batches = trainer.prepare(loader())
        list(batches)
        trainer.predict(model, batches, step).collect()
        assert batches.next_epoch == 1


def test_what_has_no_rows_is_refused():
    with Trainer(devices="cpu", progress=False) as trainer:
        with pytest.raises(StepError, match=r"one row for each sample of its batch.*tensor of shape \(\)"):
            trainer.predict(network(), loader(), lambda m, b: m(b[0]).sum()).collect()
        with pytest.raises(StepError, match="one row for each sample"):
            trainer.predict(network(), loader(), lambda m, b: (m(b[0]), b[0][:1])).collect()


def test_what_cannot_be_written_is_refused(tmp_path):
    with Trainer(devices="cpu", progress=False) as trainer:
        predictions = trainer.predict(network(), loader(), step)
        with pytest.raises(ConfigError, match=r"end in .jsonl or .safetensors, not to 'all.csv'"):
            predictions.save(tmp_path / "all.csv")
        with pytest.raises(StepError, match="holds tensors alone, and the predictions have list as 'name'"):
            predictions.save(tmp_path / "all.safetensors")
        with pytest.raises(LoaderError, match="nothing to predict"):
            trainer.predict(network(), [], step).collect()
