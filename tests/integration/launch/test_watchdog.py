"""A step that never ends: the report of the launcher has the positions of all ranks."""

import pytest

from tests.tp_trainer.hanging_run import run_hanging

LAUNCH = ["-m", "tp_core.cli", "launch", "-n", "2"]


@pytest.mark.takes(50)
@pytest.mark.slow
def test_every_rank_says_where_it_stands(tmp_path):
    done = run_hanging(tmp_path, "time.sleep(600)", *LAUNCH)
    assert done.returncode == 124
    for rank in (0, 1):
        assert f"[rank{rank}] tp_trainer: rank {rank} is in step 3 for too long" in done.stderr
    assert "in backward" in done.stderr  # of rank 0, which waits for the gradients of rank 1
    account = done.stderr[done.stderr.rindex("failed first: exit code 124") :]
    assert "rank 0 in step 3" in account
    assert "rank 1 in step 3" in account
    assert "in hangs_in_third_step" in account


@pytest.mark.takes(55)
@pytest.mark.slow
def test_a_rank_in_native_code_is_told_of_by_the_others(tmp_path):
    done = run_hanging(tmp_path, "ctypes.PyDLL(None).sleep(600)", *LAUNCH)
    assert done.returncode == 124
    account = done.stderr[done.stderr.rindex("failed first: exit code 124") :]
    assert "rank 0 in step 3" in account
    assert "rank 1 in code that lets no Python run" in account
