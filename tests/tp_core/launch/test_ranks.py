"""Ranks of real processes: fresh ones for one function, and ones that live on for many."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver

import psutil
import pytest
import torch
import torch.distributed as dist
from tp_core.errors import RankFailedError
from tp_testing import RankPool, rank_outcomes, run_ranks


def rank():
    return int(os.environ["RANK"])


def only_on_rank_1(function):
    def check():
        if rank() == 1:
            function()
        else:
            threading.Event().wait()  # in a collective, it might be

    return check


def raises():
    msg = "the check's own words"
    raise ValueError(msg)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def join():
    dist.init_process_group("gloo")


def total():
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return mine.item()


@pytest.fixture
def pool():
    with RankPool(2) as ranks:
        yield ranks


def test_a_function_runs_on_fresh_ranks_and_returns_by_rank():
    first, second = run_ranks(lambda: (rank(), os.getpid()), 2), run_ranks(lambda: (rank(), os.getpid()), 2)
    assert [r for r, _ in first] == [r for r, _ in second] == [0, 1]
    assert len({pid for _, pid in (*first, *second)}) == 4


def test_the_rank_that_died_is_named_and_not_those_that_were_ended_because_of_it():
    with pytest.raises(RankFailedError, match="rank 1 was killed by SIGKILL"):
        run_ranks(only_on_rank_1(dies), 2)


def test_each_rank_ends_in_its_own_way_when_that_is_asked():
    returned, killed = rank_outcomes(lambda: dies() if rank() else "done", 2)
    assert (returned.ok, returned.value) == (True, "done")
    assert str(killed) == "rank 1 was killed by SIGKILL"


@pytest.mark.slow
def test_ranks_of_two_threads_end_each_in_its_own_way(monkeypatch):
    # An exit status can be read once, and starting a process reads those of others. Here whoever reads it
    # first takes long, after a process's id, which comes the same way.
    read, reads = forkserver.read_signed, Counter()

    def read_late(descriptor):
        reads[descriptor] += 1
        time.sleep(0.2 * (reads[descriptor] % 2 == 0))
        return read(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_late)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: rank_outcomes(os.getpid, 1, timeout_s=60)[0], range(9)))
    assert [outcome.exitcode for outcome in found] == [0] * 9


def test_a_pool_runs_many_checks_in_the_same_ranks(pool):
    assert pool.run(os.getpid) == pool.run(os.getpid)
    assert pool.run(lambda a, b: (rank(), a + b), 1, 2) == [(0, 3), (1, 3)]


def test_a_pool_is_set_up_once():
    with RankPool(2, setup=join) as ranks:
        assert [ranks.run(total) for _ in range(3)] == [[2.0, 2.0]] * 3


@pytest.mark.parametrize(
    ("end", "message"),
    [
        pytest.param(raises, "the check's own words", marks=pytest.mark.slow),
        (dies, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_check_that_fails_ends_its_ranks_and_the_next_one_gets_new_ones(pool, end, message):
    before = pool.run(os.getpid)
    with pytest.raises(RankFailedError, match=message):
        pool.run(only_on_rank_1(end))
    assert not {*before} & {*pool.run(os.getpid)}


def waits():
    threading.Event().wait()


def waits_on_rank_1():
    if rank():
        waits()


@pytest.mark.slow
def test_a_check_that_hangs_is_ended_at_the_deadline(capfd):
    with RankPool(2, timeout_s=3.0) as ranks:
        with pytest.raises(RankFailedError, match=r"^rank 1 had not ended at the deadline\n") as raised:
            ranks.run(waits_on_rank_1)
        ranks.timeout_s = 600.0
        assert ranks.run(rank) == [0, 1]
    assert " in waits_on_rank_1\n" in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_fresh_ranks_that_hang_say_where(capfd):
    with pytest.raises(RankFailedError, match=r"^rank 0 had not ended at the deadline\n") as raised:
        run_ranks(waits, 2, timeout_s=3.0)
    assert "\nrank 1 had not ended at the deadline\n" in str(raised.value)
    assert str(raised.value).count(" in waits\n") == 2
    assert capfd.readouterr().err == ""


def test_a_failed_setup_is_raised_and_tried_again(tmp_path):
    marker = tmp_path / "been here"

    def at_the_second_time():
        if rank() == 0 and not marker.exists():
            marker.touch()
            raises()

    with RankPool(1, setup=at_the_second_time) as ranks:
        with pytest.raises(RankFailedError, match="own words"):
            ranks.run(rank)
        assert ranks.run(rank) == [0]


def test_closing_twice_does_nothing(pool):
    (pid, _) = pool.run(os.getpid)
    pool.close()
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_ctrl_c_while_a_rank_starts_leaves_none(monkeypatch):
    read, started = forkserver.read_signed, []

    def interrupted(fd):  # where the id of a process that runs already is read
        os.kill(os.getpid(), signal.SIGINT)
        started.append(read(fd))
        return started[-1]

    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(time.sleep, 2, 600)
    (pid,) = started
    assert not psutil.pid_exists(pid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_program_needs_no_guard_of_its_main(tmp_path):
    program = "import os\nfrom tp_testing import run_ranks\nprint(run_ranks(lambda: os.environ['RANK'], 2))\n"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout == "['0', '1']\n", done.stderr
