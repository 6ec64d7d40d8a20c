"""Training and evaluation mode, module by module, before, in and after a training."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_trainer import Callback, Trainer, Validation

from tests.reference_training import mean_square


class Freeze(Callback):
    def on_fit_start(self, run):
        run.model[1].eval()


def train(model, *, val_step=mean_square, **options):
    loader = DataLoader(TensorDataset(torch.arange(24.0).reshape(12, 2) / 24), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Trainer(progress=False, backend="single") as trainer:
        trainer.fit(
            model,
            optimizer,
            loader,
            step=mean_square,
            validation=Validation(loader, step=val_step),
            epochs=2,
            **options,
        )


def modes(model):
    return [module.training for module in model.modules()]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def test_a_module_frozen_at_the_start_of_the_run_stays_frozen_through_validations(model):
    before = model[1].running_mean.clone()
    train(model, callbacks=[Freeze()])
    assert torch.equal(model[1].running_mean, before)


def test_each_module_is_left_in_the_mode_that_it_had(model):
    model[1].eval()
    before = modes(model)
    train(model)
    assert modes(model) == before


def test_a_module_that_the_training_takes_out_of_evaluation_mode_is_named(model, caplog):
    model[1].eval()
    train(model)
    assert "while fit sets the whole model to training mode: 1;" in caplog.text


def test_of_a_part_in_evaluation_mode_the_part_alone_is_named(caplog):
    backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(2, 1)})
    model.forward = lambda x: model["head"](model["backbone"](x))
    model["backbone"].eval()
    train(model)
    assert "training mode: backbone;" in caplog.text


def test_a_part_without_running_statistics_is_trained_without_a_word(caplog):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.1)), nn.Linear(2, 1))
    model[0].eval()
    train(model)
    assert not caplog.text


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_without_a_word(model, caplog):
    before = model[1].running_mean.clone()
    train(model.eval())
    assert not torch.equal(model[1].running_mean, before)
    assert not any(modes(model))
    assert not caplog.text


def test_modes_are_put_back_after_an_error(model):
    model[1].eval()
    before = modes(model)
    with pytest.raises(StepError):
        train(model, val_step=lambda model, batch: "no loss")
    assert modes(model) == before
