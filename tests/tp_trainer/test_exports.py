"""The public surface of tp_trainer."""

import pytest
import tp_trainer
from tp_trainer import compat


def test_the_public_names_of_tp_trainer_are_these():
    assert tp_trainer.__all__ == [
        "Callback",
        "Checkpoints",
        "DdpOptions",
        "EpochRecord",
        "FsdpOptions",
        "FunctionMetric",
        "GradientRules",
        "History",
        "Interrupted",
        "Limits",
        "LogOptions",
        "Loop",
        "MemoryTable",
        "Metric",
        "Predictions",
        "RunView",
        "SchedulerOptions",
        "Step",
        "Trainer",
        "Validation",
        "Verification",
        "callbacks",
        "checkpoint_activations",
        "compat",
        "convert",
        "estimate",
        "find_checkpoint",
        "hosting",
        "loggers",
        "tuning",
        "write_report",
    ]
    assert all(hasattr(tp_trainer, name) for name in tp_trainer.__all__)


@pytest.mark.parametrize("name", compat.__all__)
def test_earlier_spellings_can_be_imported_from_the_package_itself(name):
    assert getattr(tp_trainer, name) is getattr(compat, name)
    assert name not in tp_trainer.__all__


def test_the_seeds_spelling_is_the_same_class():
    assert compat.Parallel_Trainer is compat.ParallelTrainer
