"""A run that is interrupted and resumed ends with the weights of one that never was.

On other backends the conformance kit proves it.
"""

import random

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from tp_core.errors import LoaderError
from tp_trainer import Checkpoints, SchedulerOptions, Trainer

from tests.cases import first_fast
from tests.reference_training import StoppedError, rows_and_sums


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))


def make_data(n=46):
    return rows_and_sums(n, 4, dtype=torch.float32, curved=True)


def make_loader(**kwargs):
    return DataLoader(make_data(), batch_size=8, shuffle=True, **kwargs)


class Counted:
    """A step that raises at its n-th call."""

    def __init__(self, stop_at):
        self.left = stop_at

    def __call__(self, model, batch):
        if model.training:
            self.left -= 1
            if self.left == 0:
                raise StoppedError
        x, y = batch
        error = model(x) - y + 0.01 * torch.randn(())
        return {"loss": error.square().mean(), "bias": error.mean()}


def one_cycle(optimizer):
    return schedulers.OneCycleLR(optimizer, 0.1, total_steps=30)


def train(folder, *, stop_at=0, resume=None, new_loader=make_loader, make_scheduler=one_cycle, **kwargs):
    """Train for three epochs of six batches; return the weights and what the epochs came to."""
    arguments = {k: kwargs.pop(k) for k in ("accumulate", "precision", "options") if k in kwargs}
    every = kwargs.pop("every_steps", 1)
    with Trainer(devices="cpu", seed=5, progress=False, **arguments) as trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        history = trainer.fit(
            model,
            optimizer,
            new_loader(),
            step=Counted(stop_at),
            epochs=3,
            validation=DataLoader(make_data(9), batch_size=4),
            scheduler=SchedulerOptions(make_scheduler(optimizer), every="step"),
            checkpoint=None if folder is None else Checkpoints(folder, every_steps=every),
            resume=resume,
            **kwargs,
        )
        weights = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        return weights, [(r.steps, r.samples, dict(r.train), dict(r.val), r.learning_rate) for r in history]


def assert_resumed_is_uninterrupted(folder, stop_at, **kwargs):
    expected = train(None, **kwargs)
    kwargs = {"every_steps": max(1, stop_at - 1)} | kwargs
    with pytest.raises(StoppedError):
        train(folder, stop_at=stop_at, **kwargs)
    found = train(folder, resume="auto", **kwargs)
    assert found[1] == expected[1]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in expected[0].items())


@pytest.mark.parametrize("stop_at", [1, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 12, 18))])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, stop_at):
    assert_resumed_is_uninterrupted(tmp_path, stop_at)


def tensor_rate(optimizer):
    for group in optimizer.param_groups:
        group["lr"], group["foreach"] = torch.tensor(0.02), False
    return schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 18)], [4]
    )


SCHEDULERS = {
    "steps by number": lambda o: schedulers.MultiStepLR(o, [3, 9, 14], gamma=0.5),
    "one after the other": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.MultiStepLR(o, [2, 6])], [4]
    ),
    "several at once": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "up and down": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
    "a function": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "of a tensor": tensor_rate,
}


@pytest.mark.parametrize("name", first_fast(SCHEDULERS, 2))
def test_every_kind_of_scheduler_goes_on(tmp_path, name):
    assert_resumed_is_uninterrupted(tmp_path, 8, make_scheduler=SCHEDULERS[name])


class Shuffled(Sampler):
    """A sampler that keeps random numbers of its own, which nobody else knows of."""

    def __init__(self, n):
        self.n, self.numbers = n, random.Random(3)

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.numbers.sample(range(self.n), self.n))


LOADERS = {
    "generator": lambda: make_loader(generator=torch.Generator().manual_seed(7)),
    "weights": lambda: DataLoader(make_data(), 8, sampler=WeightedRandomSampler(torch.arange(46) + 1.0, 46)),
    "batches": lambda: DataLoader(
        make_data(), batch_sampler=BatchSampler(RandomSampler(range(46)), 8, False)
    ),
    "workers": lambda: make_loader(num_workers=1, persistent_workers=True, prefetch_factor=3),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop_at", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_whatever_orders_the_samples(tmp_path, stop_at, name):
    assert_resumed_is_uninterrupted(tmp_path, stop_at, new_loader=LOADERS[name])


def test_a_sampler_that_orders_by_what_nobody_knows_is_refused_in_its_second_epoch(tmp_path):
    def new_loader():
        return DataLoader(make_data(), 8, sampler=Shuffled(46))

    assert_resumed_is_uninterrupted(tmp_path / "first", 4, new_loader=new_loader)
    with pytest.raises(LoaderError, match=r"sampler gives epoch 1 another order.*at sample 16 of it"):
        assert_resumed_is_uninterrupted(tmp_path / "second", 9, new_loader=new_loader)


@pytest.mark.parametrize("stop_at", [4, 9])
def test_also_from_the_middle_of_an_accumulation(tmp_path, stop_at):
    assert_resumed_is_uninterrupted(tmp_path, stop_at, accumulate=4)


def test_also_where_the_last_checkpoint_is_some_steps_old(tmp_path):
    assert_resumed_is_uninterrupted(tmp_path, 12, every_steps=4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-true"])
def test_also_in_lower_precision(tmp_path, precision):
    assert_resumed_is_uninterrupted(tmp_path, 9, precision=precision)
