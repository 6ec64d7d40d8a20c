"""The backend over ``fully_shard`` does what every backend must do."""

import pytest
from tp_core.testing import BackendConformance
from tp_trainer._backends._fsdp._backend import FsdpBackend
from tp_trainer.testing import TrainingConformance


class TestFsdp(BackendConformance):
    backend = FsdpBackend
    processes = 2


@pytest.mark.slow
class TestFsdpOnFourRanks(BackendConformance):
    backend = FsdpBackend
    processes = 4


@pytest.mark.slow
class TestTrainingOnFsdp(TrainingConformance):
    backend = FsdpBackend
    processes = 2


@pytest.mark.slow
class TestTrainingOnFourRanks(TrainingConformance):
    backend = FsdpBackend
    processes = 4


@pytest.mark.slow
class TestTrainingOnTwoCopies(TrainingConformance):
    backend = FsdpBackend
    processes = 4
    options = {"replicas": 2}
