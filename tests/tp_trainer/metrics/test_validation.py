"""The validation of a run goes over its loaders, unless a signal asks the run to end."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_testing import run_ranks
from tp_trainer import FunctionMetric, Trainer, Validation

# A signal between two rounds of a gather cannot be sent from outside.
from tp_trainer._metrics import (
    Evaluator,
    GatherInterruptedError,
    OrderedGather,
    StepBoundaries,
    metric_for_scheduler,
    without_metrics,
)


def step(model, batch):
    x, y = batch
    return {"loss": (model(x) - y).square().mean(), "largest": x, "rows": x}


@pytest.fixture
def boundaries(validation):
    """Where a validation in one process looks for signals."""
    return StepBoundaries(validation.session)


@pytest.fixture
def validation():
    x = torch.arange(20.0)[:, None]
    with Trainer(devices="cpu", progress=False, seed=0) as trainer:
        loaders = {
            f"{name}/": trainer.prepare(DataLoader(TensorDataset(part, part), batch_size=4), training=False)
            for name, part in (("small", x[:6]), ("large", x))
        }
        metrics = {"largest": FunctionMetric(lambda x: x.max()), "rows": FunctionMetric(lambda x: x)}
        evaluator = Evaluator(run=lambda _: trainer.session.run, step=step, loaders=loaders, metrics=metrics)

        def evaluate(run=trainer.session.run, **options):
            return replace(evaluator, run=lambda _: run).evaluate(
                trainer.session, nn.Linear(1, 1), epoch=0, **options
            )

        evaluate.session = trainer.session
        yield evaluate


def test_results_are_named_after_their_loaders_and_are_numbers(validation):
    found = validation()
    assert sorted(found) == ["large/largest", "large/loss", "small/largest", "small/loss"]
    assert (found["small/largest"], found["large/largest"]) == (5, 19)


def test_a_signal_cuts_a_validation_short_within_a_batch(validation, boundaries):
    batches = 0

    def run(*arguments):
        nonlocal batches
        batches += 1
        if batches == 4:  # of the second loader
            boundaries.note(15)
        return validation.session.run(*arguments)

    with pytest.raises(GatherInterruptedError) as cut:
        validation(run, boundaries=boundaries)
    assert (cut.value.signal, batches) == (15, 4)


def test_a_validation_can_be_of_few_batches(validation):
    found = validation(most=1)
    assert (found["small/largest"], found["large/largest"]) == (3, 3)


def _uneven(keeps):
    """One rank sees a signal in the last of its batches, of which the other one has fewer."""
    with Trainer(devices="cpu", progress=False) as trainer:
        boundaries = StepBoundaries(trainer.session)
        boundaries.open(lambda: False)
        rounds = OrderedGather(trainer.session, boundaries=boundaries, keeps=keeps)

        def go_over(batches):
            for number in batches:
                if number == 39:
                    boundaries.note(12)
                list(rounds.add(number, number) if keeps else rounds.reach(number))
            list(rounds.finish())

        with pytest.raises(GatherInterruptedError) as cut:
            go_over(range(40 if trainer.rank else 3))
        boundaries.close()
    return cut.value.signal


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_with_fewer_batches_learn_of_a_signal_too(keeps):
    assert run_ranks(partial(_uneven, keeps), 2) == [12, 12]


def test_what_a_step_returns_for_metrics_is_not_for_training():
    x = torch.ones(2, 1)
    trained = without_metrics(step, {"largest": None, "rows": None})
    assert list(trained(nn.Linear(1, 1), (x, x))) == ["loss"]
    assert without_metrics(lambda model, batch: model, {"rows": None})(3, x) == 3


def test_a_scheduler_looks_at_the_validation_loss_or_what_was_named():
    train, val = {"loss": 1.0}, {"loss": 2.0, "f1": 0.5}
    assert metric_for_scheduler(None, train, val, validates=True) == 2.0
    assert metric_for_scheduler(None, train, {}, validates=False) == 1.0
    assert metric_for_scheduler("val_f1", train, val, validates=True) == 0.5
    with pytest.raises(ConfigError, match=r"looks at 'val_loss', .* run: loss, val_a/loss; name one"):
        metric_for_scheduler(None, train, {"a/loss": 1.0}, validates=True)


def test_a_result_that_is_no_number_is_warned_of_once(caplog):
    model = nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), batch_size=2)
    counts = FunctionMetric(lambda rows: torch.ones(3), arrays="torch")
    with Trainer(devices="cpu", progress=False) as trainer:
        history = trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            data,
            step=lambda model, batch: step(model, batch) | {"largest": 0.0},
            epochs=2,
            validation=Validation(data, metrics={"rows": counts}),
        )
    assert "val_rows" not in history[-1].metrics
    assert caplog.text.count("'rows' of the validation is no number, but Tensor") == 1
