"""Training through the registry on a CUDA device that is named twice."""

import pytest
from tp_dp_gather._backend import GatherBackend
from tp_trainer.testing import TrainingConformance
from tp_tuple._backend import TupleBackend

GPU = "cuda:0"

pytestmark = pytest.mark.gpu


class TestTuple(TrainingConformance):
    backend = TupleBackend
    devices = (GPU, GPU)


class TestGather(TrainingConformance):
    backend = GatherBackend
    devices = (GPU, GPU)
