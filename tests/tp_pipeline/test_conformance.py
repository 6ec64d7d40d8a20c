"""The backend does what every backend must do, by tp_core's and tp_trainer's kits."""

import pytest
import torch
from tp_testing import BackendConformance, TrainingConformance

from tests.installed import backend_class

PipelineBackend = backend_class("pipeline")

SHARED = {"ranks": 2, "data": "fsdp"}
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
        "test_buffers_that_steps_write_are_kept": "a forward that writes buffers is refused",
    }

    @staticmethod
    def gradients(session, model):
        """Return whole gradients; of shared weights, each data rank has rows."""
        named = session.unwrap(model).named_parameters()
        mine = {n: p.grad.clone() for n, p in named if p.grad is not None and p.grad.numel()}
        rows = {}
        for place, theirs in session.gather_objects((session.data_rank, mine)):
            for name, gradient in theirs.items():
                rows.setdefault(name, {})[place] = gradient
        shapes = {name: tensor.shape for name, tensor in session.state_parts(model).items()}
        return {
            name: own[0] if own[0].shape == shapes[name] else torch.cat([own[i] for i in sorted(own)])
            for name, own in rows.items()
        }


@pytest.mark.nightly
class TestSharedWeights(TestTwoStages):
    processes = 4
    options = SHARED
    limits = TestTwoStages.limits | {
        f"test_{what}_where_there_are_more_than_two": "the test takes 3 ranks, and these groups have 2"
        for what in (
            "gathers_have_the_rows_of_all_ranks",
            "objects_come_from_every_rank",
            "reductions_are_those_of_all_ranks",
        )
    }


@pytest.mark.slow
class TestTraining(TrainingConformance):
    backend = PipelineBackend
    processes = 2


@pytest.mark.nightly
class TestTrainingSharedWeights(TestTraining):
    processes = 4
    options = SHARED
