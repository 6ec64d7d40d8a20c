"""Every ready-made callback does what callbacks must, and the kit notices those that do not."""

import pytest
import torch
from torch import nn
from tp_testing import CallbackConformance
from tp_trainer import Callback
from tp_trainer.callbacks import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientNorm,
    GradualUnfreezing,
    LearningRateMonitor,
    Profiler,
    StochasticWeightAveraging,
    Throughput,
)


@pytest.mark.slow
class TestExponentialMovingAverage(CallbackConformance):
    def make(self, folder):
        return ExponentialMovingAverage(decay=0.5)


@pytest.mark.slow
class TestStochasticWeightAveraging(CallbackConformance):
    def make(self, folder):
        return StochasticWeightAveraging(1)


@pytest.mark.slow
class TestEarlyStopping(CallbackConformance):
    def make(self, folder):
        return EarlyStopping("val_loss", patience=1, min_delta=100.0)


@pytest.mark.slow
class TestGradualUnfreezing(CallbackConformance):
    def make(self, folder):
        return GradualUnfreezing({1: ["2"], 2: [""]})


@pytest.mark.slow
class TestGradientNorm(CallbackConformance):
    def make(self, folder):
        return GradientNorm()


@pytest.mark.nightly  # it keeps as little as GradientNorm
class TestLearningRateMonitor(CallbackConformance):
    def make(self, folder):
        return LearningRateMonitor()


@pytest.mark.nightly  # it keeps as little as GradientNorm
class TestThroughput(CallbackConformance):
    def make(self, folder):
        return Throughput(every_steps=2, tokens_per_sample=8)


@pytest.mark.slow
class TestProfiler(CallbackConformance):
    def make(self, folder):
        return Profiler(folder / "traces", first_step=2, steps=2)


class Good(Callback):
    """Adds noise that only what it remembers determines."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, run):
        self.steps += 1
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.001 * self.steps)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Forgetful(Good):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Apart(Callback):
    """Does something else on each rank."""

    def on_step_end(self, run):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(run.rank)


class Hiding(Callback):
    """Raises where the run has failed already."""

    def on_exception(self, run, error):
        raise RuntimeError("of no concern")


class Odd(Callback):
    """Has an event without its arguments."""

    def on_optimizer_step(self, run):
        pass


def kit_of(callback):
    class Kit(CallbackConformance):
        def make(self, folder):
            return callback()

        def make_model(self):
            return nn.Linear(3, 1)

    return Kit()


def test_what_remembers_itself_passes(tmp_path):
    kit_of(Good).test_a_resumed_run_is_the_uninterrupted_one(tmp_path)


def test_a_callback_that_forgets_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="resumed at step 3"):
        kit_of(Forgetful).test_a_resumed_run_is_the_uninterrupted_one(tmp_path)


@pytest.mark.slow
def test_ranks_that_go_apart_are_noticed(tmp_path):
    with pytest.raises(AssertionError, match="the weights on rank 1"):
        kit_of(Apart).test_ranks_stay_alike(tmp_path)


def test_an_error_that_hides_another_is_noticed(tmp_path):
    with pytest.raises(RuntimeError, match="of no concern"):
        kit_of(Hiding).test_the_error_that_ends_a_run_stays_the_error_that_is_raised(tmp_path)


def test_an_event_without_its_arguments_is_noticed(tmp_path):
    with pytest.raises(TypeError, match="too many positional arguments"):
        kit_of(Odd).test_it_overrides_events_with_the_arguments_that_they_have(tmp_path)


def test_a_callback_that_overrides_nothing_is_noticed(tmp_path):
    with pytest.raises(AssertionError, match="it overrides none of on_setup, on_fit_start"):
        kit_of(Callback).test_it_overrides_events_with_the_arguments_that_they_have(tmp_path)
