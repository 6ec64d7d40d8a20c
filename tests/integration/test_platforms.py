"""Windows and macOS, simulated: Python without the modules, calls and signals that they lack.

`sys.platform`, the files of ``/proc`` and torch stay Linux's. The forge's workflow has a job on each system.
"""

import os
import subprocess
import sys

import pytest

# A program of a user: workers of a loader, checkpoints, a log, and a second go that resumes.
PROGRAM = """
import sys, torch, tp_runner
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

def step(model, batch):
    return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

def double(x):
    return 2 * x

if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4, num_workers=int(sys.argv[1]))
    for epochs in (1, 2):
        with Trainer(seed=0, devices="cpu", progress=False) as trainer:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            history = trainer.fit(
                model, optimizer, loader, step=step, epochs=epochs, checkpoint="run", resume="auto", log="csv"
            )
    results = tp_runner.map(double, range(3), n_workers=2, engine=sys.argv[2])
    print(trainer.rank, len(history), sum(results))
"""

# Loaded by each process before anything else. What the standard library needs of them is imported first.
WINDOWS = """
import asyncio, multiprocessing.util, multiprocessing.popen_spawn_posix, os, psutil, signal, subprocess, sys
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for name in (
    "fork", "forkpty", "getgid", "getloadavg", "getpgid", "getuid", "killpg", "mkfifo",
    "sched_getaffinity", "sched_setaffinity", "setpgid", "setsid", "waitid", "O_NOFOLLOW",
    "O_NONBLOCK",
):
    delattr(os, name)
for name in ("SIGCHLD", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGPIPE"):
    delattr(signal, name)
"""
MACOS = """
import fcntl, multiprocessing, os, select, signal
multiprocessing.set_start_method("spawn")
for module, names in (
    (fcntl, ["F_SETSIG"]),
    (os, ["copy_file_range", "eventfd", "memfd_create", "pidfd_open", "posix_fallocate", "posix_fadvise",
          "sched_getaffinity", "sched_setaffinity", "waitid", "O_TMPFILE"]),
    (select, ["epoll"]),
    (signal, ["sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGPWR"]),
):
    for name in names:
        delattr(module, name)
"""


@pytest.fixture
def run_on(tmp_path):
    """A function that runs a module or script where a system's own names are missing."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "site").mkdir()

    def run(system, *words):
        (tmp_path / "site" / "sitecustomize.py").write_text(system)
        paths = [str(tmp_path / "site"), *filter(None, sys.path)]
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    return run


@pytest.mark.takes(20)
@pytest.mark.slow
def test_a_job_runs_where_macos_lacks_what_linux_has(run_on):
    done = run_on(MACOS, "program.py", "1", "process")
    assert done.stdout.splitlines() == ["0 2 6"], done.stderr
    done = run_on(MACOS, "-m", "tp_core", "launch", "-n", "2", "program.py", "0", "inline")
    assert sorted(done.stdout.splitlines()) == ["[rank0] 0 2 6", "[rank1] 1 2 6"], done.stderr


@pytest.mark.takes(10)
@pytest.mark.slow
def test_a_job_runs_where_windows_lacks_what_others_have(run_on):
    done = run_on(WINDOWS, "program.py", "0", "thread")
    assert done.stdout.splitlines() == ["0 2 6"], done.stderr
    done = run_on(WINDOWS, "program.py", "0", "process")
    assert "engine='thread'" in done.stderr.splitlines()[-2], done.stderr
    done = run_on(WINDOWS, "-m", "tp_core", "launch", "-n", "2", "program.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "tp launch: tp launch needs Linux or macOS; on Windows write: torchrun --nproc-per-node 2 script.py\n"
    )
