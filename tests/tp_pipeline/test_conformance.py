"""The backend does what every backend must do, by tp_core's and tp_trainer's kits."""

import pytest
from tp_core.testing import BackendConformance
from tp_trainer.testing import TrainingConformance

from tests.installed import backend_class

PipelineBackend = backend_class("pipeline")

ONCE_MORE = "the step runs once more on stand-ins, and the test notes the rows of each call"


@pytest.mark.slow
class TestTwoStages(BackendConformance):
    backend = PipelineBackend
    processes = 2
    limits = {
        "test_shuffled_epochs_have_the_order_of_the_seed_and_the_epoch": ONCE_MORE,
        "test_a_model_without_gradients_is_evaluated_as_it_is": ONCE_MORE,
        "test_every_sample_counts_once": ONCE_MORE,
        "test_a_loader_that_is_split_already_is_taken_as_it_is": ONCE_MORE,
        "test_buffers_that_steps_write_are_kept": "a counter counts micro-batches, as accumulated batches",
    }

    @staticmethod
    def gradients(session, model):
        named = session.unwrap(model).named_parameters()
        mine = {n: p.grad.clone() for n, p in named if p.grad is not None and p.grad.numel()}
        return {n: g for theirs in session.gather_objects(mine) for n, g in theirs.items()}


@pytest.mark.slow
class TestTraining(TrainingConformance):
    backend = PipelineBackend
    processes = 2
