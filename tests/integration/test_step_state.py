"""A step that counts, or keeps a queue, is named where it runs once for each part of a batch."""

import functools
import logging
from collections import deque

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

pytest.importorskip("tp_tuple")

total = 0


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def with_list():
    calls = [0]

    def step(model, batch):
        calls[0] += 1
        return loss(model, batch)

    return step, "'calls'"


def with_queue():
    negatives = deque(maxlen=4)

    def step(model, batch):
        negatives.append(batch[0].mean())
        return loss(model, batch)

    return functools.partial(step), "'negatives'"


def with_tensor():
    running = torch.zeros(())

    def step(model, batch):
        running.mul_(0.9).add_(batch[0].mean())
        return loss(model, batch)

    return step, "'running'"


def with_global():
    def step(model, batch):
        global total  # noqa: PLW0603 - as users write it
        total += 1
        return loss(model, batch)

    return step, "'total'"


def with_attribute():
    class Losses:
        count = 0

        def step(self, model, batch):
            self.count += 1
            return loss(model, batch)

    losses = Losses()
    losses.count = 0
    return losses.step, "'self.count'"


def with_nothing():
    scale, names = 2.0, ["x"]

    def step(model, batch):
        return loss(model, batch) * scale * len(names)

    return step, ""


KINDS = [with_list, with_queue, with_tensor, with_global, with_attribute, with_nothing]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=["alone", "parts"])
def test_what_a_step_changes_by_itself_is_named(kind, devices, caplog):
    step, named = kind()
    model, x = torch.nn.Linear(2, 1), torch.ones(8, 2)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    with caplog.at_level(logging.WARNING, "tp_trainer"), Trainer(devices=devices, progress=False) as trainer:
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step)
    found = [message for message in caplog.messages if message.startswith("the step changes")]
    expected = [f"the step changes {named}, and runs once"] if named and len(devices) > 1 else []
    assert [message[: len(start)] for message, start in zip(found, expected, strict=True)] == expected
