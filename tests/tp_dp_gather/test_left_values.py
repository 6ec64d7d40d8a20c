"""A loss over what a forward pass on parts leaves behind, beside what it returns, is refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core.errors import StepError
from tp_trainer import Trainer

from tests.reference_training import rows_and_sums


class Net(nn.Module):
    """Keeps its hidden rows, and a loss over them, beside what it returns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.into, self.out = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        self.hidden = torch.tanh(self.into(x))
        self.aux_loss = self.hidden.square().mean()
        return self.out(self.hidden)

    def encode(self, x):
        return self.into(x)


def fit(step, model=None):
    model = Net() if model is None else model
    with Trainer(backend="dp-gather", devices=["cpu", "cpu"], seed=0, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, DataLoader(rows_and_sums(8), batch_size=4), step=step)
    return model


def error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def test_a_loss_that_forward_leaves_on_a_module_is_named():
    with pytest.raises(StepError, match="does not return: 'aux_loss', which forward has set"):
        fit(lambda model, batch: error(model, batch) + model.aux_loss)


def test_what_a_hook_keeps_is_refused():
    kept, model = {}, Net()
    model.into.register_forward_hook(lambda module, args, output: kept.update(output=output))
    with pytest.raises(StepError, match="what a hook or a list of the program has kept"):
        fit(lambda model, batch: error(model, batch) + kept["output"].square().mean(), model)


STEPS = [
    error,
    lambda model, batch: error(model, batch) + sum(p.square().sum() for p in model.parameters()),
    lambda model, batch: error(model, batch) + model.encode(batch[0]).square().mean(),
    lambda model, batch: error(model, batch) + model.out(model.into(batch[0])).square().mean(),
    lambda model, batch: error(model, (model(batch[0]).expand(-1, 3), batch[1])),
    lambda model, batch: error(model, batch) + error(model, (batch[0].flip(1), batch[1])),
    lambda model, batch: error(model, batch) + float(model.aux_loss.detach()),
]


@pytest.mark.parametrize("step", STEPS)
def test_losses_over_what_is_returned_and_over_parameters_are_taken(step):
    fit(step)


def test_a_loss_that_takes_what_forward_leaves_from_a_later_step_on_is_named():
    steps = iter(range(100))

    def warming_up(model, batch):
        weight = 1.0 if next(steps) >= 3 else 0.0
        return error(model, batch) + (weight * model.aux_loss if weight else 0.0)

    model = Net()
    with Trainer(backend="dp-gather", devices=["cpu", "cpu"], seed=0, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows_and_sums(24), batch_size=4)
        with pytest.raises(StepError, match="does not return: 'aux_loss', which forward has set"):
            trainer.fit(model, optimizer, loader, step=warming_up)
