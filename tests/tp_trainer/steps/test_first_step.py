"""A first step that trains nothing, or does what fit() does after it, is told."""

import functools
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_trainer import Trainer

from tests.reference_training import mean_square, train

ONE = {"backend": "single", "devices": "cpu"}
SEVERAL = [
    pytest.param({"backend": "tuple", "devices": ["cpu"] * 2}, id="tuple"),
    pytest.param({"backend": "dp-gather", "devices": ["cpu"] * 2}, id="dp-gather"),
]
ALL = [pytest.param(ONE, id="single"), *SEVERAL]


def loader():
    return DataLoader(TensorDataset(torch.rand(8, 2)), batch_size=4)


def fit(kind, step, model=None, parameters=None, **options):
    model = nn.Linear(2, 1) if model is None else model
    parameters = model.parameters() if parameters is None else parameters
    with Trainer(seed=0, progress=False, **kind) as trainer:
        trainer.fit(model, torch.optim.SGD(parameters, lr=0.1), loader(), step=step, epochs=2, **options)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("kind", ALL)
def test_a_loss_of_another_model_is_told_once(kind, caplog):
    other = nn.Linear(2, 1)
    fit(kind, lambda _, batch: mean_square(other, batch))
    (message,) = warnings(caplog)
    assert message.startswith("no parameter of the optimizer, SGD, has a gradient after the first backward")


@pytest.mark.parametrize("kind", ALL)
def test_a_loss_of_the_model_is_not_told(kind, caplog):
    fit(kind, mean_square)
    fit(kind, mean_square, clip_norm=1.0)
    assert not warnings(caplog)


def test_an_optimizer_of_a_part_that_gets_no_gradients_is_told(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fit(ONE, lambda m, b: m[1](m[0](b[0]).detach()).square().mean(), model, model[0].parameters())
    assert "no parameter of the optimizer" in warnings(caplog)[0]


def test_a_step_of_zero_weight_is_not_told(caplog):
    fit(ONE, lambda m, b: {"loss": mean_square(m, b), "weight": 0.0})
    assert not warnings(caplog)


def own_loop(step):
    with Trainer(seed=0, progress=False, **ONE) as trainer:
        model = nn.Linear(2, 1)
        model, optimizer, batches = trainer.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader()
        )
        train(model, optimizer, batches, functools.partial(trainer.run, step), backward=trainer.backward)


def test_a_loss_of_another_model_is_told_in_a_custom_loop(caplog):
    other = nn.Linear(2, 1)
    own_loop(lambda _, batch: mean_square(other, batch))
    (message,) = warnings(caplog)
    assert message.startswith("no parameter of any prepared model has a gradient")


def test_a_custom_loop_that_trains_is_not_told(caplog):
    own_loop(mean_square)
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ALL)
def test_an_optimizer_that_the_step_steps_itself_is_an_error(kind):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch):
        optimizer.step()
        return mean_square(model, batch)

    with (
        Trainer(progress=False, **kind) as trainer,
        pytest.raises(StepError, match=r"called step\(\) of the"),
    ):
        trainer.fit(model, optimizer, loader(), step=step)


def test_another_optimizer_may_step_within_the_step():
    other = nn.Linear(2, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)

    def step(model, batch):
        own.zero_grad()
        mean_square(other, batch).backward()
        own.step()
        return mean_square(model, batch)

    fit(ONE, step)


def goes_back(model, batch):
    loss = mean_square(model, batch)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("kind", ALL)
def test_gradients_that_the_step_makes_are_an_error(kind):
    with pytest.raises(StepError, match=r"the step has called backward\(\) itself"):
        fit(kind, goes_back)


@pytest.mark.parametrize("call", [1, 2])
def test_gradients_that_the_step_clears_are_an_error_where_batches_are_added_up(call):
    model, calls = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch):
        calls.append(None)
        (optimizer.zero_grad, optimizer.step)[call - 1]()
        return mean_square(model, batch)

    message = "the step has cleared the gradients" if call == 1 else r"the step has called step\(\)"
    with Trainer(progress=False, accumulate=2, **ONE) as trainer, pytest.raises(StepError, match=message):
        trainer.fit(model, optimizer, loader(), step=step)
