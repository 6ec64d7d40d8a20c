"""What users hang on parameters and optimizers, on the backends that other packages bring."""

import pytest
from tp_testing import UserStateConformance

from tests.installed import backend_class

OWN_COUNT = "test_it_is_carried_or_refused[a count of the step's own]"


@pytest.mark.slow
class TestTuple(UserStateConformance):
    backend = backend_class("tuple")
    devices = ("cpu", "cpu")
    limits = {OWN_COUNT: "each device runs the step on its part, and so counts"}


@pytest.mark.slow
class TestTupleWithCopies(TestTuple):
    """Each device has parameters of its own, as on several accelerators."""

    options = {"force_copies": True}


@pytest.mark.slow
class TestGather(UserStateConformance):
    backend = backend_class("dp-gather")
    devices = ("cpu", "cpu")


@pytest.mark.slow
class TestPipeline(UserStateConformance):
    backend = backend_class("pipeline")
    processes = 2
    limits = {
        OWN_COUNT: "the step is called for each part of the batch, and so counts",
        "test_it_is_carried_or_refused[accumulated gradient hooks before]": (
            "a hook is called for each part of the batch"
        ),
        "test_it_is_carried_or_refused[nonlinear gradient hooks before]": (
            "a hook sees the gradient of each part of the batch"
        ),
    }
