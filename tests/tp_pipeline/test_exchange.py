"""What a rank of stages waits for, and when its device has done its work."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tp_core import LaunchEnvironment
from tp_core.sessions import join_process_group

# private: a session of one rank exchanges nothing
from tp_pipeline._schedule import Orders, StageWork
from tp_pipeline._stage_exchange import StageExchange

LIMIT_S = 7.0


class Request:
    """A request that notes how it was waited for."""

    def __init__(self):
        self.waits = []

    def wait(self, *limits):
        self.waits.append(limits)


@pytest.fixture
def group():
    leave = join_process_group(LaunchEnvironment.read({}), device=torch.device("cpu"))
    yield dist.group.WORLD
    leave()


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_a_receive_blocks_the_host_on_the_cpu_alone(group, kind):
    store = dist.HashStore()
    exchange = StageExchange(group, Orders("1F1B", 1), torch.device(kind), LIMIT_S, store, ("mates", 1))
    received, sent = Request(), Request()
    exchange.wait([received], "outputs", StageWork("F", 0, 0), 0)
    exchange._sent.append((sent, torch.zeros(1)))
    exchange.finish()
    # torch's groups of accelerators block the host if they are given a limit, and only then.
    expected = [(timedelta(seconds=LIMIT_S),)] if kind == "cpu" else [()]
    assert received.waits == sent.waits == expected
