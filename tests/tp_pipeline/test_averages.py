"""Averages of weights in stages: a run that was stopped anywhere goes on as if it had not been."""

import os
import signal
from functools import partial

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_trainer import Callback, Checkpoints, Interrupted, Trainer, Validation
from tp_trainer.callbacks import ExponentialMovingAverage, StochasticWeightAveraging

from tests.reference_training import squared_error

AVERAGES = {
    "moving": partial(ExponentialMovingAverage, 0.9),
    "stochastic": partial(StochasticWeightAveraging, 1),
}
PLACES = ("step", "epoch", "validation")
"""Where a run is stopped: in a step, at an epoch's end, within a validation."""


class Tower(nn.Module):
    """Equal blocks, and a head that training alone uses: a step of a validation needs less of the model."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(16, 1)
        self.more = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.blocks(self.first(x))
        return self.last(hidden) + self.more(hidden) if self.training else self.last(hidden)


class Signal(Callback):
    """Ends a run at a place: by a signal to rank 0."""

    def __init__(self, place):
        self.place = place

    def at(self, place):
        if place == self.place and int(os.environ.get("RANK", "0")) == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, run):
        if run.step == 2:
            self.at("step")

    def on_epoch_end(self, run):
        self.at("epoch")


def train(options, average, folder=None, *, place=None, resume=None):
    """Return the averaged state, the model's own, and the validations; ``None`` of a run that is stopped."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tower().double()
    if options.get("weights") == "shard":
        ts.distributed.init_process_group(2)
        model = ts.parallelize(model, {"blocks.0.0": ts.Column(gather_output=True)})
    try:
        return _fit(model, options, AVERAGES[average](), folder, Signal(place), resume)
    except Interrupted:
        return None
    finally:
        if ts.distributed.is_initialized():
            ts.distributed.destroy_process_group()


def _fit(model, options, average, folder, stop, resume):
    x = torch.randn(52, 8, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def step(model, batch):
        if not model.training:
            stop.at("validation")
        return squared_error(model, batch)

    settings = {"options": {"pipeline": options}, "devices": "cpu", "seed": 0, "progress": False}
    with Trainer(backend="pipeline", **settings) as trainer:
        history = trainer.fit(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            DataLoader(data, batch_size=8),
            step=step,
            epochs=2,
            validation=Validation(DataLoader(data, batch_size=8), every_steps=3),
            checkpoint=None if folder is None else Checkpoints(folder),
            resume=resume,
            callbacks=[average, stop],
        )
        with average.in_place_of(model):
            averaged = {name: value.clone() for name, value in trainer.session.model_state(model).items()}
        return averaged, trainer.session.model_state(model), [record.val for record in history]


def stopped_and_resumed(options, average, folder):
    """Return what a run ends with, and by place what one does that was stopped there."""
    whole = train(options, average)
    resumed = {}
    for place in PLACES:
        own = folder / f"{average}-{place}"
        assert train(options, average, own, place=place) is None, place
        resumed[place] = train(options, average, own, resume="auto")
    return whole, resumed


def check(ranks):
    for (averaged, state, validations), resumed in ranks:
        for place, found in resumed.items():
            assert found[2] == validations, place
            assert all(torch.equal(found[1][name], value) for name, value in state.items()), place
            assert all(torch.equal(found[0][name], value) for name, value in averaged.items()), place
        assert not all(torch.equal(averaged[name], value) for name, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "average"),
    [
        ({"ranks": 2, "data": "fsdp"}, "moving"),
        ({"ranks": 2, "data": "fsdp"}, "stochastic"),
        ({"ranks": 2, "weights": "shard"}, "moving"),
    ],
    ids=["rows, moving", "rows, stochastic", "split tensors, moving"],
)
def test_a_stopped_run_ends_with_the_same_averages(four, tmp_path, options, average):
    check(four.run(partial(stopped_and_resumed, options, average, tmp_path)))


def train_to(folder, steps, batch_size=8):
    """Return the weights after some steps, the third of which has four samples; or the refusal."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tower().double()
    x = torch.randn(20, 8, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)
    settings = {"options": {"pipeline": {"microbatches": 5}}, "devices": "cpu", "seed": 0, "progress": False}
    try:
        with Trainer(backend="pipeline", **settings) as trainer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            checkpoint = Checkpoints(folder, every_steps=1)
            trainer.fit(
                model,
                optimizer,
                loader,
                step=squared_error,
                epochs=2,
                max_steps=steps,
                checkpoint=checkpoint,
                resume="auto",
            )
            return trainer.session.model_state(model)
    except StepError as error:
        return str(error)


def stopped_before_a_short_batch(folder):
    train_to(folder / "stopped", 2)
    return train_to(folder / "whole", 5), train_to(folder / "stopped", 5), train_to(folder / "small", 5, 4)


@pytest.mark.slow
def test_a_run_goes_on_at_a_batch_with_fewer_samples_than_micro_batches(pair, tmp_path):
    for whole, resumed, refused in pair.run(partial(stopped_before_a_short_batch, tmp_path)):
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
        assert "the first batch has 4 samples, and backend 'pipeline' is to make 5" in refused


@pytest.mark.slow
def test_so_does_one_of_two_stages(pair, tmp_path):
    check(pair.run(partial(stopped_and_resumed, {}, "moving", tmp_path)))
