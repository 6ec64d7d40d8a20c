"""A rank that dies in a collective ends the others, with an error, within the group's timeout."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tp_shard as ts
from tp_testing import rank_outcomes


def one_is_killed():
    dist.init_process_group("gloo", timeout=timedelta(seconds=250))
    ts.distributed.init_process_group()
    layer = ts.nn.ParallelLinear(8, 8, dim=0)
    layer(torch.ones(1, 8))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer(torch.ones(1, 8))


def one_never_comes(noticed):
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    ts.distributed.init_process_group()
    if dist.get_rank() == 1:
        while not Path(noticed).exists():
            time.sleep(0.05)
        return
    try:
        ts.distributed.reduce(torch.ones(1))
    finally:
        Path(noticed).touch()


def test_a_killed_rank_ends_the_others_with_an_error():
    outcomes = rank_outcomes(one_is_killed, 2)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "all_reduce" in outcomes[0].error
    assert "RuntimeError" in outcomes[0].error


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_noticed_after_the_timeout(tmp_path):
    outcomes = rank_outcomes(one_never_comes, 2, str(tmp_path / "noticed"))
    assert outcomes[1].ok
    assert "imed out" in outcomes[0].error or "imeout" in outcomes[0].error
