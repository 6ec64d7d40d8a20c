"""A step that counts, or keeps a queue, is named where it runs once for each part of a batch."""

import functools
import logging
from collections import deque

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import run_ranks
from tp_trainer import Callback, Trainer

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


def with_a_loss():
    class Centered(torch.nn.Module):
        """Keeps a running mean, as the loss of DINO does."""

        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(()))

        def forward(self, output):
            self.center = self.center * 0.9 + output.detach().mean() * 0.1
            return (output - self.center).square().mean()

    centered = Centered()

    def step(model, batch):
        return centered(model(batch[0]))

    return step, "'centered'"


def with_nothing():
    scale, names = 2.0, ["x"]

    def step(model, batch):
        return loss(model, batch) * scale * len(names)

    return step, ""


KINDS = [with_list, with_queue, with_tensor, with_global, with_attribute, with_a_loss, with_nothing]


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


class Inner(torch.nn.Module):
    """Computes its loss itself, so that `dp-gather` calls the step again for each part."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x, y):
        return (self.linear(x) - y).square().mean()


def test_a_count_in_a_step_of_two_models_is_named(caplog):
    calls, x = [0], torch.ones(8, 2)

    def step(first, second, batch):
        calls[0] += 1
        return (first(batch[0]) - second(batch[0])).square().mean()

    with (
        caplog.at_level(logging.WARNING, "tp_trainer"),
        Trainer(devices=["cpu", "cpu"], progress=False) as trainer,
    ):
        models = trainer.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
        for batch in trainer.prepare(DataLoader(TensorDataset(x), batch_size=4)):
            trainer.backward(trainer.run(step, *models, batch))
    assert len(messages_of(caplog)) == 1


def messages_of(caplog):
    return [message for message in caplog.messages if message.startswith("the step changes 'calls'")]


@pytest.mark.parametrize(("in_model", "expected"), [(True, 1), (False, 0)])
def test_a_count_is_named_on_dp_gather_where_the_step_runs_again(caplog, in_model, expected):
    pytest.importorskip("tp_dp_gather")
    calls = [0]

    def step(model, batch):
        calls[0] += 1
        return model(*batch) if in_model else (model(batch[0]) - batch[1]).square().mean()

    model, x = Inner() if in_model else torch.nn.Linear(2, 1), torch.ones(8, 2)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    with (
        caplog.at_level(logging.WARNING, "tp_trainer"),
        Trainer(backend="dp-gather", devices=["cpu", "cpu"], progress=False) as trainer,
    ):
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step, epochs=2)
    assert len(messages_of(caplog)) == expected


def test_a_count_that_begins_in_a_later_epoch_is_named_once(caplog):
    calls, seen = [0], [0]

    def step(model, batch):
        if seen[0] >= 2:
            calls[0] += 1
        return loss(model, batch)

    class Passes(Callback):
        def on_step_end(self, run):
            seen[0] = run.epoch

    model, x = torch.nn.Linear(2, 1), torch.ones(8, 2)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    with (
        caplog.at_level(logging.WARNING, "tp_trainer"),
        Trainer(devices=["cpu", "cpu"], progress=False) as trainer,
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, loader, step=step, epochs=4, callbacks=[Passes()])
    assert len(messages_of(caplog)) == 1


def test_a_count_in_a_loop_of_the_users_own_is_named_once(caplog):
    step, _ = with_list()
    model, x = torch.nn.Linear(2, 1), torch.ones(8, 2)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    with (
        caplog.at_level(logging.WARNING, "tp_trainer"),
        Trainer(devices=["cpu", "cpu"], progress=False) as trainer,
    ):
        model, batches = trainer.prepare(model, loader)
        for batch in batches:
            trainer.backward(trainer.run(step, model, batch))
    assert len(messages_of(caplog)) == 1


def warned_on_the_pipeline():
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    logging.getLogger("tp_trainer").addHandler(Handler())
    step, _ = with_list()
    x = torch.ones(8, 2)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4)
    with Trainer(backend="pipeline", devices="cpu", seed=0, progress=False) as trainer:
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
            trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step)
    return [record[:30] for record in records if record.startswith(("the step changes", "training has"))]


def test_a_count_and_the_draws_of_seeds_are_named_on_the_pipeline():
    pytest.importorskip("tp_pipeline")
    first, other = run_ranks(warned_on_the_pipeline, 2)
    count, draws = "the step changes 'calls', and ", "training has drawn random numb"
    assert (first, other) == ([count, draws, count], [count, count])
