"""Training on every backend of this repository does what it must do on all of them."""

import pytest
import tp_shard
from tp_testing import TrainingConformance

from tests.installed import backend_class


@pytest.mark.slow
class TestTuple(TrainingConformance):
    backend = backend_class("tuple")
    devices = ("cpu", "cpu")


@pytest.mark.slow
class TestGather(TrainingConformance):
    backend = backend_class("dp-gather")
    devices = ("cpu", "cpu")


def split(group_size):
    if not tp_shard.distributed.is_initialized():
        tp_shard.distributed.init_process_group(group_size)
    model = TrainingConformance.make_model()
    to_parallel = tp_shard.nn.ParallelLinear.convert_parallel_linear
    model[0], model[2] = to_parallel(model[0], 1), to_parallel(model[2], 0)
    return model


@pytest.mark.slow
class TestShard(TrainingConformance):
    backend = backend_class("shard")
    processes = 2

    @staticmethod
    def make_model():
        return split(-1)


@pytest.mark.nightly
class TestShardsThatAreFullySharded(TrainingConformance):
    backend = backend_class("shard")
    processes = 4
    options = {"group_size": 2, "data": "fsdp"}

    @staticmethod
    def make_model():
        return split(2)


@pytest.mark.nightly
class TestCopiesOfShards(TrainingConformance):
    backend = backend_class("shard")
    processes = 4
    options = {"group_size": 2}

    @staticmethod
    def make_model():
        return split(2)
