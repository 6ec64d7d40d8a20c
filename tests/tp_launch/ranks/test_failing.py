"""A rank dies: the others end within seconds, and the last thing printed says who and why."""

import os
import signal

import pytest
from tp_launch._rank_logs import TemporaryLogs  # private: two launchers of one process

from tests.launches import failure_block

# Says where it is, then waits in a collective that rank 1 never joins.
_BARRIER = """
open(f"pid{rank}", "w").write(str(os.getpid()))
if rank == 1:
    dist.all_reduce(torch.ones(1))
    time.sleep(600)
dist.all_reduce(torch.ones(1))
print("in the collective", flush=True)
dist.barrier()
"""


@pytest.mark.slow
def test_a_killed_rank_ends_the_one_inside_a_collective(tp, gone):
    process = tp.start("launch", "-n", "2", tp.script(_BARRIER, gloo=True))
    assert "[rank0] in the collective" in process.stdout.readline()
    pids = [int(tp.wait_for(f"pid{rank}")) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    gone(*pids)
    _, err = process.communicate(timeout=800)
    assert process.returncode == 137
    block = failure_block(err)
    assert block.startswith("rank 1 failed first: SIGKILL, status 137\n")
    assert f"local rank 1, pid {pids[1]}" in block
    assert "rank 0" in block


@pytest.mark.parametrize(
    ("death", "status", "first_line", "told"),
    [
        pytest.param("{}['boom']", {1, 134}, "", "KeyError: 'boom'", marks=pytest.mark.slow),
        pytest.param(
            "print('last words', file=sys.stderr); os._exit(7)",
            {7},
            "exit code 7",
            "last words",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import ctypes; ctypes.string_at(0)",
            {139},
            "SIGSEGV",
            "Segmentation fault",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["exception", "exit", "crash"],
)
def test_the_rank_that_died_by_itself_is_named(tp, death, status, first_line, told):
    body = f"if rank == 1:\n    {death}\ndist.barrier()\n"
    done = tp("launch", "-n", "2", tp.script(body, gloo=True))
    assert done.returncode in status
    block = failure_block(done.stderr)
    assert block.startswith(f"rank 1 failed first: {first_line}")
    assert told in block
    assert "Connection" not in block
    assert "ChildFailedError" not in done.stderr
    assert list(tp.tmp.glob("tp-launch-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_an_error_of_all_ranks_is_shown_once_and_kept_in_each_log(tp, count):
    script = tp.script(
        """
        import os, time
        open(f"here{os.environ['RANK']}", "w").close()
        while not all(os.path.exists(f"here{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
            time.sleep(0.02)
        raise ValueError(f"bad data in rank {os.environ['RANK']}")
        """
    )
    done = tp("launch", "-n", str(count), "--log-dir", "logs", script)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count('File "') == 1
    assert "the same error, which [rank" in done.stderr
    assert all(f"ValueError: bad data in rank {rank}" in done.stderr for rank in range(count))
    assert "(the traceback is above, in the lines of [rank" in failure_block(done.stderr)
    logs = [path.read_text() for path in tp.cwd.glob("logs/**/stderr.log")]
    assert [log.count('File "') for log in logs] == [1] * count


@pytest.mark.slow
def test_a_rank_that_holds_sigterm_and_the_children_of_a_dead_one_are_killed(tp, gone):
    script = tp.script(
        """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
        child = subprocess.Popen(["sleep", "60"])
        rank = os.environ["RANK"]
        with open(f"part{rank}", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename(f"part{rank}", f"pids{rank}")
        while rank == "0" or not os.path.exists("pids0"):
            time.sleep(0.1)
        sys.exit(5)
        """
    )
    done = tp("launch", "-n", "2", "--grace-s", "1", script)
    assert done.returncode == 5
    assert "rank 0 killed by tp launch: it did not end when asked" in failure_block(done.stderr)
    gone(*(int(pid) for rank in "01" for pid in tp.wait_for(f"pids{rank}").split()))


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.nightly),
    ],
)
def test_a_launch_that_is_stopped_inside_a_collective_leaves_nobody(tp, gone, number, status):
    process = tp.start("launch", "-n", "2", tp.script(_BARRIER, gloo=True))
    assert process.stdout.readline() == "[rank0] in the collective\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=800)
    assert process.returncode == status
    assert f"tp launch: stopped by {number.name}; nothing was saved by fit: rank " in err
    gone(*(int(tp.wait_for(f"pid{rank}")) for rank in range(2)))
    assert list(tp.tmp.glob("tp-launch-*")) == []


@pytest.mark.slow
def test_a_warning_is_passed_on_and_ends_the_job_without_a_restart(tp, gone):
    script = """
        import os, signal, sys, time
        def warned(number, frame):
            print(signal.Signals(number).name, flush=True)
            sys.exit(128 + number)
        signal.signal(signal.SIGUSR1, warned)
        open(f"pid{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(600)
    """
    process = tp.start("launch", "-n", "2", "--max-restarts", "2", tp.script(script))
    pids = [int(tp.wait_for(f"pid{rank}")) for rank in range(2)]
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=800)
    assert sorted(out.splitlines()) == ["[rank0] SIGUSR1", "[rank1] SIGUSR1"]
    assert process.returncode == 138
    assert "tp launch: stopped by SIGUSR1; nothing was saved" in err
    gone(*pids)


@pytest.mark.slow
def test_a_killed_launcher_takes_its_ranks_along_and_the_next_one_its_logs(tp, gone, monkeypatch):
    script = tp.script("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)")
    process = tp.start("launch", "-n", "1", script)
    pid = int(tp.wait_for("pid"))
    process.kill()
    gone(pid)
    process.wait(800)
    assert len(list(tp.tmp.glob("tp-launch-*"))) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tp.tmp))
    logs, others = TemporaryLogs(), TemporaryLogs()
    assert sorted(tp.tmp.iterdir()) == sorted([logs.path, others.path])
    logs.remove()
    others.remove()
    assert list(tp.tmp.iterdir()) == []


@pytest.mark.slow
def test_a_broken_pipe_does_not_hide_the_status(tp):
    process = tp.start("launch", "-n", "1", tp.script("print('x'); import sys; sys.exit(4)"))
    process.stdout.close()
    assert process.wait(800) == 4
