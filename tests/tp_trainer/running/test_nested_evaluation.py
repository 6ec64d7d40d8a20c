"""An evaluation within an epoch, on the loader that is trained on."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_trainer import Callback, Trainer


class Evaluates(Callback):
    def __init__(self, trainer, loader):
        self.trainer, self.loader = trainer, loader

    def on_step_end(self, run):
        if run.step % 2:
            model = nn.Linear(1, 1)
            self.trainer.evaluate(model, self.loader, step=lambda m, b: m(b.float()[:, None]).mean())


def batches_of_two_epochs(*, evaluates):
    seen, model = [], nn.Linear(1, 1)

    def step(model, batch):
        seen.append(batch.tolist())
        return model(batch.float()[:, None]).square().mean()

    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        batches = trainer.prepare(DataLoader(range(22), batch_size=4, shuffle=True))
        callbacks = [Evaluates(trainer, batches)] if evaluates else []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainer.fit(model, optimizer, batches, step=step, epochs=2, callbacks=callbacks)
    return seen


def test_an_evaluation_on_the_loader_that_is_trained_on_changes_no_batch():
    assert batches_of_two_epochs(evaluates=True) == batches_of_two_epochs(evaluates=False)
