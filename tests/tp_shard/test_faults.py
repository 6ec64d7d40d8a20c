"""A rank that dies in a collective ends the others, with an error, within the group's timeout."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import tp_shard as ts
from tp_core.testing import rank_outcomes


def one_is_killed():
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    ts.distributed.init_process_group()
    layer = ts.nn.ParallelLinear(8, 8, dim=0)
    layer(torch.ones(1, 8))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer(torch.ones(1, 8))


def one_never_comes():
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    ts.distributed.init_process_group()
    if dist.get_rank() == 1:
        time.sleep(6)
        return
    ts.distributed.reduce(torch.ones(1))


def test_a_killed_rank_ends_the_others_with_an_error():
    began = time.monotonic()
    outcomes = rank_outcomes(one_is_killed, 2, timeout_s=30)
    assert time.monotonic() - began < 25
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "all_reduce" in outcomes[0].error
    assert "RuntimeError" in outcomes[0].error


def test_a_rank_that_does_not_come_is_noticed_within_the_timeout():
    outcomes = rank_outcomes(one_never_comes, 2, timeout_s=30)
    assert outcomes[1].ok
    assert "imed out" in outcomes[0].error or "imeout" in outcomes[0].error
