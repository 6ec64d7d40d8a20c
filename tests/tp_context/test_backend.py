"""The backend does what every backend must do, with whole batches on each rank of a sequence.

Its ``self_test_options`` keep them whole.
"""

import pytest
from tp_testing import BackendConformance

from tests.installed import backend_class

ContextBackend = backend_class("context")


@pytest.mark.slow  # the kit has no sequences; test_context of tests/integration has
class TestOneSequenceOnTwoRanks(BackendConformance):
    backend = ContextBackend
    processes = 2
    unused_options = {"find_unused_parameters": True}


@pytest.mark.nightly
class TestShardsOverDataAndContext(BackendConformance):
    backend = ContextBackend
    processes = 4
    exchange_processes = 4
    options = {"context": 2, "sequence": {}, "weights": "fsdp"}
    limits = {
        "test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean": (
            "torch sends the gradients that a rank has as one tensor, whose length then differs between ranks"
        )
    }


@pytest.mark.nightly
class TestTwoSequencesOnFourRanks(BackendConformance):
    backend = ContextBackend
    processes = 4
    exchange_processes = 4
    options = {"context": 2}
    unused_options = {"find_unused_parameters": True}
