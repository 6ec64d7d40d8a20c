"""Models that compute their loss themselves: one loss of each device, of which the session makes one."""

import pytest
import torch
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.errors import StepError
from tp_core.plugins import Job

from tests.installed import backend_class

GatherBackend = backend_class("dp-gather")
DEVICES = resolve_devices(["cpu", "cpu"])


class WithLoss(torch.nn.Module):
    """Returns what models of transformers do: a loss and scores."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 4)
        self.calls = 0

    def forward(self, x, y=None):
        self.calls += 1
        scores = self.head(x)
        loss = None if y is None else torch.nn.functional.cross_entropy(scores, y, ignore_index=-100)
        return {"loss": loss, "scores": scores}


def tokens_step(model, batch):
    return {"loss": model(batch["x"], batch["y"])["loss"], "weight": (batch["y"] != -100).sum()}


def make_batch(rows=5):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (rows,), generator=generator)
    y[1:3] = -100
    return {"x": torch.randn(rows, 3, generator=generator), "y": y}


def gathered(step, batch, *, model=None, loss="mean"):
    """Run a step on two devices; return its output and the gradient of the weights."""
    torch.manual_seed(1)
    model = WithLoss() if model is None else model
    job = Job(devices=DEVICES, environment=LaunchEnvironment.read({}), loss=loss)
    with GatherBackend().open(job) as session:
        output = session.run(step, session.prepare_model(model), batch)
        session.backward(output["loss"] if isinstance(output, dict) else output)
    return output, model.head.weight.grad


def on_one_device(step, batch):
    torch.manual_seed(1)
    model = WithLoss()
    output = step(model, batch)
    (output["loss"] if isinstance(output, dict) else output).backward()
    return output, model.head.weight.grad


def test_each_part_counts_by_its_weight():
    output, gradient = gathered(tokens_step, make_batch())
    expected, wanted = on_one_device(tokens_step, make_batch())
    torch.testing.assert_close(output["loss"], expected["loss"])
    torch.testing.assert_close(gradient, wanted)
    assert output["weight"] == 3


def test_each_part_counts_by_its_samples_where_there_is_no_weight():
    def step(model, batch):
        return model(batch["x"], batch["y"])["loss"]

    batch = make_batch() | {"y": torch.tensor([0, 1, 2, 3, 0])}
    output, gradient = gathered(step, batch)
    expected, wanted = on_one_device(step, batch)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradient, wanted)


def test_a_part_in_which_nothing_counts_counts_as_nothing():
    batch = make_batch() | {"y": torch.tensor([0, 1, 2, -100, -100])}
    output, gradient = gathered(tokens_step, batch)
    expected, wanted = on_one_device(tokens_step, batch)
    torch.testing.assert_close(output["loss"], expected["loss"])
    torch.testing.assert_close(gradient, wanted)


def test_the_model_runs_once_for_each_part():
    model = WithLoss()
    gathered(tokens_step, make_batch(), model=model)
    assert model.calls == 1, "the second part runs on the replica"


def test_a_batch_of_one_row_does_not_settle_how_the_next_ones_are_combined():
    job = Job(devices=DEVICES, environment=LaunchEnvironment.read({}))
    with GatherBackend().open(job) as session:
        model = session.prepare_model(WithLoss())
        for rows in (1, 5, 1, 5):
            output = session.run(tokens_step, model, make_batch(rows))
            assert output["loss"].numel() == 1


def test_losses_of_the_step_see_the_whole_batch():
    rows = []

    def step(model, batch):
        scores = model(batch["x"])["scores"]
        rows.append(len(scores))
        return torch.nn.functional.cross_entropy(scores, batch["y"], ignore_index=-100)

    gathered(step, make_batch())
    assert rows == [5]


def test_a_batch_that_cannot_be_split_says_what_to_do():
    with pytest.raises(StepError, match=r"computes its loss itself.*compute the loss in the step"):
        gathered(tokens_step, make_batch() | {"table": torch.ones(7, 2)})


def test_a_step_that_calls_the_model_more_often_for_a_part_is_an_error():
    def step(model, batch):
        for _ in range(1 if len(batch["x"]) == 5 else 2):
            output = tokens_step(model, batch)
        return output

    with pytest.raises(StepError, match="calls the model more often for a part"):
        gathered(step, make_batch())
