"""Signals end a launch whose ranks save nothing, and it says why."""

import contextlib
import signal

import pytest

_OUTSIDE = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
open(f"pid{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_launch_that_saves_nothing_says_why_and_leaves_nobody(tp, gone):
    process = tp.start("launch", "-n", "2", tp.script(_OUTSIDE))
    pids = [int(tp.wait_for(f"pid{rank}")) for rank in range(2)]
    process.terminate()
    _, err = process.communicate(timeout=800)
    assert process.returncode == 143
    gone(*pids)
    assert list(tp.tmp.glob("tp-launch-*")) == []
    assert "stopped by SIGTERM; nothing was saved by fit: rank 1 ended with exit code 3\n" in err


@pytest.mark.slow
def test_a_second_interrupt_kills_ranks_that_take_their_time(tp, gone):
    script = tp.script(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").write("x"))
        open("pid", "w").write(str(os.getpid()))
        while True:
            time.sleep(1)
        """
    )
    process = tp.start("launch", "-n", "1", "--grace-s", "600", script)
    pid = int(tp.wait_for("pid"))
    process.send_signal(signal.SIGINT)
    tp.wait_for("asked")
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=800)
    assert process.returncode == 130
    assert "nothing was saved by fit: rank 0 was killed at the second Ctrl-C" in err
    gone(pid)
