"""Runs the commands as a user does: as programs, with real processes, and a deadline on each."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tp_testing
from tp_launch._jobs import list_jobs  # private, both: what a test left behind is ended without a wait
from tp_launch._supervisor import stop_job

from tests.run_tp import run


@contextlib.contextmanager
def process_group(store: Path) -> Iterator[None]:
    """Have a process group of torch's own on ranks of a pool; ``store`` is a file that is not there yet.

    Trainers before it in these ranks keep the store of the pool's port open, where the addresses of an
    earlier group would be found.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


_IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

# A rank that joins a gloo group and hands over to the rest of the script.
GLOO = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
"""


class Tp:
    """Starts ``tp`` commands in a directory of their own and leaves nothing behind."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.started: list[subprocess.Popen[str]] = []
        # Not below the test's own: workers listen at sockets in it, whose paths may have 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="tp"))

    def script(self, body: str, *, name: str = "script.py", gloo: bool = False) -> str:
        path = self.cwd / name
        path.write_text((GLOO if gloo else "") + textwrap.dedent(body))
        return name

    def command(self, command: str, *args: str) -> list[str]:
        return [sys.executable, "-m", "tp_core.cli", command, *args]

    def start(self, command: str, *args: str) -> subprocess.Popen[str]:
        return self.start_command(self.command(command, *args))

    def start_command(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOGLEVEL")}
        env |= {"TP_STATE_DIR": str(self.cwd / "state"), "TMPDIR": str(self.tmp), "COLUMNS": "200"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=self.cwd, env=env, text=True, **(streams | options))
        self.started.append(process)
        return process

    def start_in_terminal(self, command: list[str]) -> tuple[subprocess.Popen[str], int]:
        """Start a command in a terminal of its own; also return the descriptor of whoever types there."""
        master, slave = os.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        take = [sys.executable, "-c", _IN_TERMINAL, *command]
        process = self.start_command(take, start_new_session=True, **streams)
        os.close(slave)
        return process, master

    def read_terminal(self, terminal: int) -> str:
        """All that is shown until the last program in the terminal has ended."""
        shown = b""
        with contextlib.suppress(OSError):  # this is how it ends
            while text := os.read(terminal, 1 << 16):
                shown += text
        os.close(terminal)
        return shown.decode()

    def __call__(self, command: str, *args: str, timeout_s: float = 800) -> subprocess.CompletedProcess[str]:
        process = self.start(command, *args)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def wait_for(self, name: str, timeout_s: float = 800) -> str:
        """The text of a file that a rank writes."""
        path = self.cwd / name
        wait_until(lambda: path.exists() and path.read_text() != "", timeout_s=timeout_s)
        return path.read_text()

    def close(self) -> None:
        try:
            self._end()
        finally:
            shutil.rmtree(self.tmp, ignore_errors=True)

    def _end(self) -> None:
        for job in list_jobs():  # a test that failed half-way leaves its job running
            stop_job(job, grace_s=0)
        for process in self.started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait(800)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def failure_block(stderr: str) -> str:
    """Return the block about a failed rank that ends the output of a launch."""
    _, rule, block = stderr.rpartition("=" * 72 + "\nrank ")
    assert rule, stderr
    assert block.rstrip().endswith("=" * 72)
    return "rank " + block


def wait_until(condition: Callable[[], object], *, timeout_s: float = 800) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tp]:
    monkeypatch.setenv("TP_STATE_DIR", str(tmp_path / "state"))  # for this process, too
    runner = Tp(tmp_path)
    yield runner
    runner.close()


@pytest.fixture
def here() -> Callable[..., Any]:
    """Runs a command inside this process, which saves it the import of torch."""

    def invoke(*words: str) -> Any:
        out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run(words)
        stdout, stderr = (_written(stream) for stream in (out, err))
        return SimpleNamespace(exit_code=status, stdout=stdout, stderr=stderr)

    return invoke


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@pytest.fixture
def gone() -> Callable[..., None]:
    """Waits until processes have ended."""

    def wait(*pids: int, timeout_s: float = 800) -> None:
        wait_until(lambda: all(is_gone(pid) for pid in pids), timeout_s=timeout_s)

    return wait


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def free_port() -> int:
    return tp_testing.free_port()


@pytest.fixture(autouse=True)
def signals_are_left_as_they_were() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
