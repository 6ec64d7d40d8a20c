"""The backend over ``fully_shard`` does what every backend must do."""

import pytest
from tp_testing import BackendConformance, TrainingConformance

from tests.installed import backend_class

FsdpBackend = backend_class("fsdp")

LIMITS = {
    "test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean": (
        "torch sends the gradients that a rank has as one tensor, whose length then differs between ranks"
    )
}


@pytest.mark.slow
class TestFsdp(BackendConformance):
    backend = FsdpBackend
    processes = 2
    limits = LIMITS


@pytest.mark.nightly
class TestFsdpOnFourRanks(BackendConformance):
    backend = FsdpBackend
    processes = 4
    limits = LIMITS


@pytest.mark.slow
class TestTrainingOnFsdp(TrainingConformance):
    backend = FsdpBackend
    processes = 2


@pytest.mark.nightly
class TestTrainingOnFourRanks(TrainingConformance):
    backend = FsdpBackend
    processes = 4


@pytest.mark.nightly
class TestTrainingOnTwoCopies(TrainingConformance):
    backend = FsdpBackend
    processes = 4
    options = {"replicas": 2}
