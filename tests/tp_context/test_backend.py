"""The backend does what every backend must do, with whole batches on each rank of a sequence.

Its ``self_test_options`` keep them whole.
"""

import pytest
from tp_core.testing import BackendConformance

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


@pytest.mark.nightly
class TestTwoSequencesOnFourRanks(BackendConformance):
    backend = ContextBackend
    processes = 4
    exchange_processes = 4
    options = {"context": 2}
    unused_options = {"find_unused_parameters": True}
