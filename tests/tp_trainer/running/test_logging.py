"""What runs hand to their loggers: numbers of steps and epochs, what happened, and no step twice or lost."""

import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_core.plugins import Logger
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Interrupted, LogOptions, SchedulerOptions, Trainer
from tp_trainer.callbacks import LearningRateMonitor
from tp_trainer.loggers import JsonLinesLogger, read_run, using_config

from tests.reference_training import rows_and_sums, squared_error

STEPS = 10  # of two epochs


def train(
    folder, *, log="jsonl", every=1, hyperparameters=None, stop_at=0, signal_at=0, checkpoint=True, **settings
):
    calls, losses = 0, []

    def step(model, batch):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise RuntimeError("stopped")
        if calls == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = squared_error(model, batch)
        losses.append(loss.item())
        return loss

    data = rows_and_sums(20, dtype=torch.float32)
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    with Trainer(seed=3, progress=False, devices="cpu", backend="single") as trainer:
        history = trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            DataLoader(data, batch_size=4, shuffle=True),
            step=step,
            epochs=2,
            checkpoint=Checkpoints(folder, every_steps=2) if checkpoint else None,
            resume="auto" if checkpoint else None,
            log=LogOptions(log, every_steps=every, hyperparameters=hyperparameters),
            **settings,
        )
    return losses, history


def test_the_loss_of_every_interval_and_the_means_of_epochs_are_logged(tmp_path):
    losses, history = train(tmp_path, every=2)
    run = read_run(tmp_path)
    # Intervals begin with each epoch of five steps, and end with it.
    intervals = ((0, 2), (2, 4), (4, 5), (5, 6), (6, 8), (8, 10))
    means = [sum(losses[i:j]) / (j - i) for i, j in intervals]
    steps, values = run.series("loss")
    assert steps == [2, 4, 5, 6, 8, 10]
    assert values == pytest.approx(means, rel=1e-6)
    assert run.series("epoch_loss") == ([5, 10], [record.train["loss"] for record in history])
    assert run.series("learning_rate")[0][-1] == STEPS
    assert run.status == "finished"


def test_the_record_says_what_the_run_was(tmp_path):
    train(tmp_path, log="csv", hyperparameters={"dataset": "squares"})
    info = read_run(tmp_path).info  # which is kept beside every other log
    assert info["hyperparameters"]["lr"] == 0.05
    assert info["hyperparameters"]["optimizer"] == "SGD"
    assert info["hyperparameters"]["dataset"] == "squares"
    assert info["hyperparameters"]["seed"] == 3
    assert info["selection"].startswith("backend 'single'")
    assert any(candidate["chosen"] for candidate in info["candidates"])
    assert info["versions"]["torch"]
    assert info["environment"]["host"]
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LinearLR", {"start_factor": 0.1}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": STEPS}),
        ("CosineAnnealingLR", {"T_max": STEPS}),
    ],
)
def test_the_record_has_the_settings_that_were_asked_for_and_not_those_of_a_schedule(tmp_path, name, options):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    with Trainer(seed=3, progress=False, devices="cpu", backend="single") as trainer:
        trainer.fit(
            model,
            optimizer,
            DataLoader(rows_and_sums(20, dtype=torch.float32), batch_size=4),
            step=squared_error,
            scheduler=SchedulerOptions(schedule, every="step"),
            checkpoint=tmp_path,
            log="jsonl",
        )
    found = read_run(tmp_path).info["hyperparameters"]
    assert (found["lr"], found["momentum"]) == (0.01, 0.5)


def test_a_value_that_a_program_was_called_with_is_recorded_as_it_was_asked_for(tmp_path):
    with using_config({"lr": 7.0, "width": 3}, "lr: 7.0\nwidth: 3\n"):
        train(tmp_path)
    found = read_run(tmp_path).info["hyperparameters"]
    assert (found["lr"], found["width"], found["optimizer"]) == (7.0, 3, "SGD")


@pytest.mark.parametrize(("every", "steps"), [(1, [*range(1, STEPS + 1)]), (4, [4, 5, 8, 10])])
def test_a_run_that_failed_and_was_resumed_has_every_step_once_and_the_same_numbers(tmp_path, every, steps):
    train(tmp_path / "whole", every=every)
    with pytest.raises(RuntimeError, match="stopped"):
        train(tmp_path / "cut", stop_at=8, every=every)
    assert read_run(tmp_path / "cut").status == "failed"
    train(tmp_path / "cut", every=every)
    whole, cut = read_run(tmp_path / "whole"), read_run(tmp_path / "cut")
    assert cut.series("loss") == whole.series("loss")
    assert cut.series("loss")[0] == steps
    assert [(line["step"], line["resumed"]) for line in cut.of_type("run")] == [(0, False), (6, True)]
    saved = [line["facts"]["name"] for line in cut.of_type("event")]
    assert "step-0000000006" in saved


def test_a_run_that_a_limit_cuts_short_logs_its_last_steps_and_goes_on_in_the_interval(tmp_path):
    losses, _ = train(tmp_path, max_steps=3, every=4)
    assert read_run(tmp_path).series("loss") == ([3], [pytest.approx(sum(losses) / 3, rel=1e-6)])
    more, _ = train(tmp_path, every=4)
    steps, values = read_run(tmp_path).series("loss")
    assert steps[-3:] == [5, 8, 10]
    assert values[steps.index(4)] == pytest.approx((sum(losses) + more[0]) / 4, rel=1e-6)


def test_a_run_that_was_interrupted_says_so(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, signal_at=4)
    run = read_run(tmp_path)
    assert run.status == "interrupted"
    assert run.of_type("event")[-1]["event"] == "interruption"
    assert run.of_type("event")[-1]["facts"]["signal"] == "SIGTERM"


def test_numbers_of_an_own_loop_are_logged(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(progress=False, devices="cpu", seed=0, backend="single") as trainer:
        model, optimizer, loader = trainer.prepare(
            model, optimizer, DataLoader(TensorDataset(torch.ones(8, 1)), 2)
        )
        state = {"model": model, "optimizer": optimizer}
        with trainer.loop(
            loader, state=state, log=LogOptions(JsonLinesLogger(tmp_path), every_steps=3)
        ) as loop:
            for n, (x,) in enumerate(loop, start=1):
                loss = trainer.run(lambda m, b: m(b).mean(), model, x)
                trainer.backward(loss)
                loop.log(loss=loss, n=n)
    run = read_run(tmp_path)
    assert run.series("n") == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    assert run.info["hyperparameters"]["optimizer"] == "SGD"


def test_a_wrong_name_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        train(tmp_path, log="tensorbord", stop_at=1)
    with pytest.raises(ConfigError, match="every_steps"):
        train(tmp_path, every=0, stop_at=1)


def test_a_log_without_a_place_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder to log to; give CsvLogger\(folder\)"):
        train(tmp_path, log="csv", checkpoint=False, stop_at=1)


def test_without_log_nothing_is_written(tmp_path):
    train(tmp_path, log=None)
    assert not (tmp_path / "log.jsonl").exists()


class Unopenable(Logger):
    name = "unopenable"

    def open(self, info):
        raise OSError("no room")

    def log(self, numbers, *, step, epoch):
        raise AssertionError

    def close(self, status):
        raise AssertionError


def _train_on_a_rank(folder, log):
    data = TensorDataset(torch.arange(8.0).reshape(8, 1))
    model = nn.Linear(1, 1)
    with Trainer(seed=0, progress=False, devices="cpu") as trainer:
        for epochs in (1, 2):
            trainer.fit(
                model,
                torch.optim.SGD(model.parameters(), lr=0.01),
                DataLoader(data, 2),
                step=lambda m, b: m(b[0]).square().mean(),
                epochs=epochs,
                checkpoint=folder,
                resume="auto",
                log=LogOptions(log, every_steps=1),
            )


@pytest.mark.slow
def test_of_several_ranks_the_first_writes(tmp_path):
    run_ranks(_train_on_a_rank, 2, tmp_path, "csv")
    run = read_run(tmp_path)
    assert run.series("loss")[0] == [*range(1, 9)]
    assert len(run.of_type("run")) == 2
    assert (tmp_path / "metrics.csv").read_text().count("\n") >= 9


def _fails_to_open(folder):
    with pytest.raises((OSError, ConfigError), match="no room"):
        _train_on_a_rank(folder, Unopenable())


@pytest.mark.slow
def test_a_logger_that_cannot_be_opened_ends_the_run_on_every_rank(tmp_path):
    run_ranks(_fails_to_open, 2, tmp_path)


class WithoutRate(torch.optim.Optimizer):
    """Has no learning rate in its groups, as optimizers have that choose their own."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.05)


@pytest.mark.parametrize("settings", [{}, {"lr": None}], ids=["no key", "None"])
def test_an_optimizer_without_a_rate_is_logged_without_it(tmp_path, settings):
    data = rows_and_sums(20, dtype=torch.float32)
    model = nn.Linear(3, 1)
    for epochs in (1, 2):  # the second resumes
        with Trainer(seed=3, progress=False, devices="cpu", backend="single") as trainer:
            history = trainer.fit(
                model,
                WithoutRate(model.parameters(), **settings),
                DataLoader(data, batch_size=4),
                step=squared_error,
                epochs=epochs,
                checkpoint=tmp_path,
                resume="auto",
                log=LogOptions("jsonl", every_steps=1),
                callbacks=[LearningRateMonitor()],
            )
    run = read_run(tmp_path)
    assert run.series("loss")[0] == list(range(1, STEPS + 1))
    assert run.series("learning_rate") == run.series("lr") == ([], [])
    assert math.isnan(history[-1].learning_rate)
