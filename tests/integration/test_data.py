"""Loaders of tp-data in the trainer, in Accelerate and in Lightning: exact after a resume on other ranks."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from tp_core.errors import LoaderError
from tp_data import BatchSize, Loader, Stream
from tp_trainer import Checkpoints, Limits, Trainer


def make(batch=8, *, size=30, **options):
    inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    samples = [{"id": i, "x": x, "y": x.sum(0, keepdim=True)} for i, x in enumerate(inputs)]
    return Loader(Stream(samples, shuffle=True, **options), batch)


def fit(folder, *, backend="single", max_steps=None, resume=None, loader=None, epochs=2, **limits):
    """Train; return the ids of this rank in each step, and the weights."""
    seen = []

    def step(model, batch):
        seen.append(batch["id"].tolist())
        return mse_loss(model(batch["x"]), batch["y"])

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    limits = Limits(max_steps=max_steps, **limits)
    with Trainer(backend=backend) as trainer:
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            make() if loader is None else loader,
            step=step,
            epochs=epochs,
            limits=limits,
            resume=resume,
            checkpoint=Checkpoints(folder),
        )
    return seen, model.weight.detach().clone()


def joined(parts):
    return [[*a, *b] for a, b in zip(*(seen for seen, _ in parts), strict=True)]


def test_a_run_on_a_loader_continues_in_the_middle_of_an_epoch(tmp_path):
    whole, weights = fit(tmp_path / "whole")
    assert sorted(sum(whole[:4], [])) == list(range(30))
    begun, _ = fit(tmp_path / "cut", max_steps=6)
    rest, again = fit(tmp_path / "cut", resume="auto")
    assert begun + rest == whole
    assert torch.equal(weights, again)


def test_the_stats_of_a_loader_are_there_after_fit(tmp_path):
    loader = make()
    fit(tmp_path, loader=loader)
    assert (loader.stats.batches, loader.stats.rows) == (8, 60)


def test_the_epochs_of_an_endless_stream_continue_it(tmp_path):
    def run(folder, **options):
        return fit(folder, loader=make(repeat=True), epochs=3, steps_per_epoch=3, **options)

    whole, weights = run(tmp_path / "whole")
    assert sorted(sum(whole, [])[:30]) == list(range(30))
    begun, _ = run(tmp_path / "cut", max_steps=5)
    rest, again = run(tmp_path / "cut", resume="auto")
    assert begun + rest == whole
    assert torch.equal(weights, again)


@pytest.mark.slow
def test_ranks_have_parts_of_the_steps_of_one_and_either_continues_the_other(tmp_path, pair):
    whole, weights = fit(tmp_path / "whole")
    parts = pair.run(lambda: fit(tmp_path / "pair", backend="ddp"))
    assert joined(parts) == whole
    assert torch.allclose(parts[0][1], weights, atol=1e-6)
    first, _ = fit(tmp_path / "cut", max_steps=2)
    second = joined(pair.run(lambda: fit(tmp_path / "cut", backend="ddp", max_steps=5, resume="auto")))
    third, end = fit(tmp_path / "cut", resume="auto")
    assert first + second + third == whole
    assert torch.allclose(end, weights, atol=1e-6)


def evaluate(backend="single", *, devices="auto", **options):
    seen = []

    def step(model, batch):
        seen.append(batch["id"].tolist())
        return {"loss": mse_loss(model(batch["x"]), batch["y"])}

    torch.manual_seed(0)
    with Trainer(backend=backend, devices=devices) as trainer:
        model = trainer.prepare(nn.Linear(4, 1))
        found = trainer.evaluate(model, make(size=17, **options), step=step)
        rows = trainer.predict(model, make(size=17, **options), step=lambda model, batch: batch["id"])
        predicted = rows.collect().tolist()
    return sum(seen, []), found["loss"], predicted


@pytest.mark.slow
def test_an_evaluation_has_each_sample_once(pair):
    seen, loss, rows = evaluate()
    parts = pair.run(lambda: evaluate(backend="ddp"))
    assert sorted(seen) == sorted(rows) == sorted(parts[0][0] + parts[1][0]) == list(range(17))
    assert parts[0][1] == pytest.approx(loss, rel=1e-6)
    assert parts[0][2] == parts[1][2] == rows


def test_an_evaluation_on_devices_of_one_process_has_each_sample_once():
    seen, loss, rows = evaluate()
    theirs = evaluate(backend="tuple", devices=["cpu", "cpu"])
    assert sorted(theirs[0]) == sorted(seen)
    assert theirs[1] == pytest.approx(loss, rel=1e-6)
    assert theirs[2] == rows


def test_a_loader_without_a_length_needs_the_number_of_steps(tmp_path):
    with pytest.raises(LoaderError, match=r"\(Loader\) has no length: .* has no end.*; give the number of"):
        fit(tmp_path, loader=make(repeat=True))


def accelerated(state=None, stop=None):
    """Train with Accelerate; return the ids and its saved state."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = make(BatchSize(8, last="drop"))
    model, prepared = accelerator.prepare(nn.Linear(4, 1), loader)
    accelerator.register_for_checkpointing(loader)
    if state is not None:
        accelerator.load_state(state)
    seen = []
    for batch in prepared:
        accelerator.backward(mse_loss(model(batch["x"]), batch["y"]))
        seen.append(batch["id"].tolist())
        if len(seen) == stop:
            accelerator.save_state(state_folder(stop))
            break
    return seen


def state_folder(stop):
    import os

    return os.environ["TP_TEST_FOLDER"] + f"/{stop}"


@pytest.mark.slow
@pytest.mark.needs("accelerate")
def test_accelerate_saves_and_resumes_a_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_TEST_FOLDER", str(tmp_path))
    whole = accelerated()
    begun = accelerated(stop=2)
    assert begun + accelerated(state=str(tmp_path / "2")) == whole


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("default")  # its own
def test_lightning_saves_and_resumes_a_loader(tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 1), []

        def training_step(self, batch, number):
            self.seen.append(batch["id"].tolist())
            return mse_loss(self.layer(batch["x"]), batch["y"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(path=None, **options):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[saving], **quiet, **options)
        module = Module()
        trainer.fit(module, make(), ckpt_path=path)
        return module.seen

    whole = run()
    begun = run(max_steps=2)
    assert begun + run(tmp_path / "epoch=0-step=2.ckpt") == whole


def test_a_state_is_json():
    loader = make()
    next(iter(loader))
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
