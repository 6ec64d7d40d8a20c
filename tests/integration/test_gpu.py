"""Training through the registry on an accelerator that is named twice."""

import pytest
from tp_testing import TrainingConformance

from tests.accelerator import GPU
from tests.installed import backend_class

GatherBackend = backend_class("dp-gather")
TupleBackend = backend_class("tuple")

pytestmark = pytest.mark.gpu


class TestTuple(TrainingConformance):
    backend = TupleBackend
    devices = (GPU, GPU)


class TestGather(TrainingConformance):
    backend = GatherBackend
    devices = (GPU, GPU)
