"""What the runner's tests share: programs that run by themselves, and a look at what they left."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.own_words import own_words


def _end_with_this_process():
    """Have the kernel kill a program when the test run is: nobody else would end it then."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@pytest.fixture
def start_script(tmp_path):
    """Start a program in a process of its own, in its own session."""
    started = []

    def start(code, *arguments):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(code))
        process = subprocess.Popen(
            [sys.executable, "-u", str(path), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_this_process,  # noqa: PLW1509 - it takes no lock that a thread may hold
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a failed test has left of it too
        process.communicate()


@pytest.fixture
def run_script(start_script):
    """Run a program to its end; return what it printed."""

    def run(code, *arguments, timeout_s=800):
        process = start_script(code, *arguments)
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, err
        assert not own_words(err), err
        return out

    return run


@pytest.fixture
def is_running():
    """Tell whether a process runs; a zombie does not."""

    def running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return running


@pytest.fixture
def processes_of():
    """List the running processes of a session."""

    def running(session):
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, its_session, *_ = path.read_text().rsplit(")", 1)[1].split()
                if int(its_session) == session and state != "Z":
                    found.append(int(path.parent.name))
        return found

    return running


@pytest.fixture
def wait_until():
    def wait(condition, *, timeout_s=800):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    return wait
