"""Ranks from within a program: what they return, and how their failures are told."""

import signal
import subprocess
import sys
import threading
from operator import add

import pytest
from tp_core.errors import ConfigError, RankFailedError
from tp_launch import launch

PROGRAM = """
import os, sys, time
from tp_core.errors import RankFailedError
from tp_launch import launch

class Found:
    def __init__(self, number):
        self.number = number

def work(x, *, y):
    print("hello")
    return Found(int(os.environ["RANK"]) * x + y)

def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("no good")
    time.sleep(10_000)

found = launch(work, 2, 3, y=5)
assert all(type(one) is Found for one in found)
print([one.number for one in found])
try:
    launch(fail, 2)
except RankFailedError as error:
    print(error)
"""


def run(program, cwd):
    path = cwd / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, path], cwd=cwd, capture_output=True, text=True, timeout=800, check=False
    )


@pytest.mark.slow
def test_functions_of_a_program_run_on_ranks_and_a_failure_is_raised_with_its_traceback(tmp_path):
    pytest.importorskip("cloudpickle")
    done = run(PROGRAM, tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert sorted(lines[:2]) == ["[rank0] hello", "[rank1] hello"]
    assert lines[2] == "[5, 8]"
    assert "rank 1 failed first: exit code 1, status 1" in done.stdout
    assert "ValueError: no good" in done.stdout
    assert "in fail" in done.stdout


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_is_named():
    code = "import os, time; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(10_000)"
    with pytest.raises(RankFailedError, match="rank 1 failed first: SIGKILL"):
        launch(exec, 2, code)


@pytest.mark.slow
def test_a_rank_that_leaves_without_returning_is_an_error():
    with pytest.raises(RankFailedError, match="rank 0 ended before the function returned"):
        launch(sys.exit, 1, 0)


@pytest.mark.slow
def test_what_cannot_be_sent_back_is_named():
    with pytest.raises(RankFailedError, match="returned a lock, which cannot be sent"):
        launch(threading.Lock, 1)


@pytest.mark.slow
def test_ctrl_c_is_for_the_ranks_and_for_the_program(tp):
    script = tp.script(
        """
        from tp_launch import launch

        try:
            launch(exec, 1, "print('here'); import signal; signal.pause()")
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    process = tp.start_command([sys.executable, script])
    assert process.stdout.readline() == "[rank0] here\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(800) == 0


def test_a_rank_launches_no_ranks_of_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"launch\(\) was called in rank 0 of 2; start the program with"):
        launch(add, 2, 1, 2)


def test_what_cannot_be_sent_to_a_rank_is_refused():
    with pytest.raises(ConfigError, match=r"sends the function and its arguments.*cannot pickle"):
        launch(print, 1, threading.Lock())


def test_without_cloudpickle_what_is_defined_in_main_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def own():
        """Be of a script."""

    own.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"own is defined in __main__.*'tp-launch\[notebook\]'"):
        launch(own, 1)


@pytest.mark.slow
def test_without_cloudpickle_a_function_of_a_module_is_sent_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert launch(add, 1, "a word: ", "__main__") == ["a word: __main__"]
