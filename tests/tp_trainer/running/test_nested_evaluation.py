"""An evaluation within an epoch, on the loader that is trained on."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from tp_trainer import Callback, Limits, Trainer


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


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(22))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_that_is_trained_on_is_evaluated_whole_and_goes_on(workers):
    seen, found = [], []

    def step(model, batch):
        seen.extend(batch.tolist())
        return model(batch.float()[:, None]).square().mean()

    def numbers(model, batch):
        return {"mean": batch.double().mean()}

    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        loader = DataLoader(Numbers(), batch_size=4, num_workers=workers, persistent_workers=bool(workers))
        model, batches = nn.Linear(1, 1), trainer.prepare(loader)
        callback = Callback()
        callback.on_step_end = lambda run: found.append(
            trainer.evaluate(model, batches, step=numbers)["mean"]
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainer.fit(
            model,
            optimizer,
            batches,
            step=step,
            limits=Limits(steps_per_epoch=3),
            epochs=2,
            callbacks=[callback],
        )
        found.append(trainer.evaluate(model, batches, step=numbers)["mean"])
        assert torch.equal(torch.cat(list(trainer.predict(model, batches, lambda _, b: b))), torch.arange(22))
    assert seen == list(range(22))
    assert found == pytest.approx([10.5] * 7)
