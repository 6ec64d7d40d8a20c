"""The backend does what every backend must do, with one copy of the model and with two."""

import pytest
import tp_shard as ts
from torch import nn
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.jobs import Footprint
from tp_core.plugins import Job
from tp_testing import BackendConformance

from tests.installed import backend_class

ShardBackend = backend_class("shard")


class _Split(BackendConformance):
    backend = ShardBackend
    group_size = -1

    @classmethod
    def form_groups(cls):
        if not ts.distributed.is_initialized():
            ts.distributed.init_process_group(cls.group_size)

    @staticmethod
    def gradients(session, model):
        plain = session.unwrap(model)
        named = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        return {n: g.clone() for n, g in ts.collect_state_dict(plain, named).items()}


def split_model():
    model = BackendConformance.make_model()
    to_parallel = ts.nn.ParallelLinear.convert_parallel_linear
    model[0], model[2] = to_parallel(model[0], 1), to_parallel(model[2], 0)
    return model


@pytest.mark.slow
class TestOneCopyOnTwoRanks(_Split):
    processes = 2

    @staticmethod
    def make_model():
        TestOneCopyOnTwoRanks.form_groups()
        return split_model()


@pytest.mark.nightly
class TestTwoCopiesOnFourRanks(_Split):
    processes = 4
    exchange_processes = 4
    group_size = 2
    options = {"group_size": 2}
    unused_options = {"find_unused_parameters": True}

    @staticmethod
    def make_model():
        TestTwoCopiesOnFourRanks.form_groups()
        return split_model()


@pytest.mark.nightly
class TestCopiesThatAreFullySharded(_Split):
    processes = 4
    exchange_processes = 4
    group_size = 2
    options = {"group_size": 2, "data": "fsdp"}
    limits = {
        "test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean": (
            "torch sends the gradients that a rank has as one tensor, whose length then differs between ranks"
        )
    }

    @staticmethod
    def make_model():
        TestCopiesThatAreFullySharded.form_groups()
        return split_model()


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def verdict(devices="cpu", model=None, **environ):
    job = Job(
        devices=resolve_devices(devices),
        environment=LaunchEnvironment.read(environ),
        explicit_devices=True,
        model=model,
    )
    return ShardBackend().assess(job)


def test_it_says_why_it_does_not_fit():
    assert verdict().remedy == "tp launch -n 2 script.py (pip install tp-launch)"
    assert "2 devices in each process" in verdict(2, **LAUNCHED).reason
    unsplit = verdict(model=nn.Linear(2, 2), **LAUNCHED)
    assert not unsplit.is_fit
    assert "no split parameters" in unsplit.reason
    assert verdict(**LAUNCHED).score == 5


def need(free, **options):
    """Return the backend's verdict, and what it says that a job of four ranks in pairs needs."""
    model = nn.Linear(2, 2)
    model.weight.tp_sharded = True
    job = Job(
        devices=resolve_devices("cpu"),
        environment=LaunchEnvironment.read(LAUNCHED | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}),
        model=model,
        options={"shard": {"group_size": 2, **options}},
        footprint=Footprint(weights=100, gradients=100, optimizer=200, activations=10, with_gradients=110),
        free_nbytes=free,
    )
    backend = ShardBackend()
    return backend.assess(job).reason, backend.estimate_memory(job)


def test_shards_are_fully_sharded_where_whole_ones_do_not_fit():
    reason, whole = need(10_000)
    assert "fully sharded" not in reason
    reason, half = need(whole.total - 1)
    assert "fully sharded over the copies" in reason
    assert half.total < whole.total
    assert need(10_000, data="fsdp")[1].total == half.total


def test_they_are_not_where_something_else_was_asked_for():
    assert "fully sharded" not in need(1, data="ddp")[0]
    assert "fully sharded" not in need(1, bucket_cap_mb=1.0)[0]
    assert "fully sharded" not in need(1, group_size=4)[0]
