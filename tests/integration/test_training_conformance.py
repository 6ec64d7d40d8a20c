"""Training on every backend of this repository does what it must do on all of them."""

import pytest
from tp_trainer.testing import TrainingConformance

tp_shard = pytest.importorskip("tp_shard")
shard_backend = pytest.importorskip("tp_shard._backend")
gather_backend = pytest.importorskip("tp_dp_gather._backend")
tuple_backend = pytest.importorskip("tp_tuple._backend")


class TestTuple(TrainingConformance):
    backend = tuple_backend.TupleBackend
    devices = ("cpu", "cpu")


class TestGather(TrainingConformance):
    backend = gather_backend.GatherBackend
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
    backend = shard_backend.ShardBackend
    processes = 2

    @staticmethod
    def make_model():
        return split(-1)


@pytest.mark.slow
class TestShardsThatAreFullySharded(TrainingConformance):
    backend = shard_backend.ShardBackend
    processes = 4
    options = {"group_size": 2, "data": "fsdp"}

    @staticmethod
    def make_model():
        return split(2)


@pytest.mark.slow
class TestCopiesOfShards(TrainingConformance):
    backend = shard_backend.ShardBackend
    processes = 4
    options = {"group_size": 2}

    @staticmethod
    def make_model():
        return split(2)
