"""The backend does what every backend must do, by tp_core's and tp_trainer's kits."""

import pytest
from tp_core.testing import BackendConformance
from tp_trainer.testing import TrainingConformance

from tests.installed import backend_class

PipelineBackend = backend_class("pipeline")


class _Stages(BackendConformance):
    backend = PipelineBackend

    @staticmethod
    def gradients(session, model):
        named = session.unwrap(model).named_parameters()
        mine = {n: p.grad.clone() for n, p in named if p.grad is not None and p.grad.numel()}
        return {n: g for theirs in session.gather_objects(mine) for n, g in theirs.items()}


@pytest.mark.slow
class TestTwoStages(_Stages):
    processes = 2


@pytest.mark.slow
class TestTraining(TrainingConformance):
    backend = PipelineBackend
    processes = 2
