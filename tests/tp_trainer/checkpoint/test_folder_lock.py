"""One folder, one run: a second one is refused, and a process that dies leaves the folder free."""

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest
import torch
import tp_core.state
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError
from tp_core.files import Ownership
from tp_core.state import write_whole
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.cases import first_fast
from tests.run_tp import run
from tests.tp_trainer import small_run
from tests.tp_trainer.small_run import leave, names, same, train

ROOT = Path(__file__).parents[3]
cloudpickle.register_pickle_by_value(small_run)  # for ranks, which do not know this folder

# A run that stands in its third step until it is told to go on; its loader has workers.
STANDING = """
import sys
from tests.tp_trainer.small_run import train

def stand(n):
    if n == 3:
        print("standing", flush=True)
        sys.stdin.readline()

train(sys.argv[1], before=stand, every_epochs=None, loader={"num_workers": 2})
"""

# A process that locks a folder, and a copy of it that outlives it.
FORKING = """
import os, sys, time
from pathlib import Path
from tp_core.files import Ownership

lock = Ownership(Path(sys.argv[1]), is_folder=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def start():
    """Start a program with an argument; return it and its first line."""
    programs = []

    def starting(code, *arguments):
        program = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        programs.append(program)
        return program, program.stdout.readline().strip()

    yield starting
    for program in programs:
        program.kill()
        program.communicate(timeout=800)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("tp_core.files._ownership.GRACE_S", 0.2)


@pytest.mark.slow
def test_a_second_run_is_refused_with_the_first_ones_process_and_host(tmp_path, start, impatient):
    folder = tmp_path / "run"
    first, said = start(STANDING, folder)
    assert said == "standing"
    before = names(folder)
    who = f"process {first.pid} on host {re.escape(socket.gethostname())} writes .* since 20..-..-.. "
    with pytest.raises(ConfigError, match=rf"run is in use: {who}.*one run at a time.*give another folder"):
        train(folder)
    assert names(folder) == before == [".lock", "step-0000000001", "step-0000000002"]
    # Reading from it is allowed.
    assert same(train(tmp_path / "other", resume=folder / "step-0000000002"), train(None))
    first.communicate("go on\n", timeout=800)
    assert first.returncode == 0
    assert names(folder) == ["step-0000000008", "step-0000000009", "step-0000000010"]


@pytest.mark.slow
def test_a_run_with_workers_that_was_killed_can_be_started_again_at_once(tmp_path, start, impatient):
    first, said = start(STANDING, tmp_path / "run")
    assert said == "standing"
    first.kill()
    first.wait(800)  # its workers notice that it is gone some seconds later
    assert same(train(tmp_path / "run"), train(None))


def test_a_forked_process_that_outlives_the_run_does_not_keep_the_folder(tmp_path, start, impatient):
    first, copy = start(FORKING, tmp_path)
    with pytest.raises(ConfigError, match=f"process {first.pid} on host"):
        Ownership(tmp_path, is_folder=True)
    first.kill()
    first.wait(800)
    os.kill(int(copy), 0)  # it is alive, and stays so until its input is closed
    Ownership(tmp_path, is_folder=True).release()


def test_a_program_that_the_run_started_does_not_keep_the_folder(tmp_path):
    lock = Ownership(tmp_path, is_folder=True)
    program = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        lock.release()
        Ownership(tmp_path, is_folder=True).release()
    finally:
        program.kill()
        program.wait()


def test_a_forked_copy_does_not_give_the_folder_back(tmp_path, impatient):
    lock = Ownership(tmp_path, is_folder=True)
    pid = os.fork()
    if pid == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(ConfigError, match=r"process \d+ \(this process\)"):
        Ownership(tmp_path, is_folder=True)
    lock.release()


def test_runs_in_one_process_may_follow_one_another_and_not_run_at_once(tmp_path, impatient):
    def again(n):
        if n == 2:
            train(tmp_path)

    with pytest.raises(ConfigError, match=r"\(this process\)"):
        train(tmp_path, before=again)
    assert names(tmp_path) == ["step-0000000001"]
    leave(tmp_path, 3)
    assert same(train(tmp_path), train(None))
    train(tmp_path, epochs=3)
    assert ".lock" not in names(tmp_path)


def test_an_old_lock_file_is_nobodys(tmp_path):
    (tmp_path / ".lock").write_text("\x00 what is this")
    train(tmp_path, keep=1)
    assert names(tmp_path) == ["step-0000000010"]


def test_a_lock_file_that_says_nothing_of_its_owner_is_still_a_lock(tmp_path, impatient):
    lock = Ownership(tmp_path, is_folder=True)
    (tmp_path / ".lock").write_text("[]")
    with pytest.raises(ConfigError, match="is in use: another process writes there"):
        Ownership(tmp_path, is_folder=True)
    lock.release()


@pytest.mark.parametrize("number", first_fast([errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]))
def test_a_file_system_without_locks_is_named_in_the_log(tmp_path, monkeypatch, caplog, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert same(train(tmp_path), train(None))
    assert (
        f"the file system of {tmp_path} has no locks ({OSError(number, os.strerror(number))})" in caplog.text
    )


@pytest.mark.slow
def test_the_lock_that_another_run_gives_back_is_taken(tmp_path, start, monkeypatch):
    monkeypatch.setattr("tp_core.files._ownership.GRACE_S", 50.0)
    first, _ = start(STANDING, tmp_path)
    first.send_signal(signal.SIGTERM)
    first.stdin.write("go on\n")
    first.stdin.flush()  # it saves and ends, while this one waits for it
    assert same(train(tmp_path), train(None))


def refused(folder):
    pytest.MonkeyPatch().setattr("tp_core.files._ownership.GRACE_S", 0.2)
    with pytest.raises(ConfigError) as caught:
        train(folder)
    return str(caught.value)


def test_all_ranks_of_a_second_job_are_refused(tmp_path):
    lock = Ownership(tmp_path, is_folder=True)
    first, second = run_ranks(refused, 2, tmp_path)
    assert first.startswith(f"{tmp_path} is in use: process {os.getpid()} on host")
    assert second == f"rank 0 could not write checkpoints to {tmp_path}: {first}"
    assert names(tmp_path) == [".lock"]
    lock.release()


def wait_for_writing():
    for thread in threading.enumerate():
        if thread.name == "tp-checkpoint":
            thread.join(800)


# -- a folder that goes away -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asynchronous", "what"), first_fast([(False, ""), (True, ".lock"), (False, ".lock"), (True, "")], 2)
)
def test_a_folder_that_is_deleted_is_made_again_and_the_log_says_so(tmp_path, caplog, asynchronous, what):
    folder = tmp_path / "run"

    def delete(n):
        if n == 4:
            wait_for_writing()
            path = folder / what
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    found = train(folder, before=delete, keep=9, every_epochs=None, every_steps=2, background=asynchronous)
    assert same(found, train(None))
    kept = {f"step-{n:010d}" for n in (4, 6, 8, 10)}
    assert kept <= {*names(folder)}
    assert f"{folder} was deleted, or its lock, while the run writes its checkpoints there" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_is_deleted_while_a_checkpoint_is_written_has_it_in_the_end(
    tmp_path, caplog, monkeypatch, asynchronous
):
    folder, write = tmp_path / "run", write_whole
    calls = 0

    def deleting(tensors, path):
        nonlocal calls
        calls += 1
        written = write(tensors, path)
        if calls in {10, 11}:  # of one checkpoint, twice
            shutil.rmtree(folder)
        return written

    monkeypatch.setattr("tp_trainer._checkpoint._checkpointer.write_whole", deleting)
    assert same(train(folder, background=asynchronous), train(None))
    assert names(folder) == ["step-0000000010"]
    assert "is made again" in caplog.text


def _delete_while_ranks_write(folder):
    write, calls = tp_core.state.write_tensors, 0

    def deleting(*arguments, **options):
        nonlocal calls
        calls += 1
        written = write(*arguments, **options)
        if calls < 3 and os.environ["RANK"] == "0":
            shutil.rmtree(folder)  # what this rank goes on to complete
        return written

    tp_core.state.write_tensors = deleting
    with Trainer(seed=0, progress=False, devices="cpu", backend="fsdp") as trainer:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = Checkpoints(folder, background=True)
        loader = DataLoader(torch.ones(8, 4), batch_size=4)
        trainer.fit(model, optimizer, loader, step=lambda m, x: m(x).sum(), epochs=1, checkpoint=settings)
    return calls


@pytest.mark.slow
def test_ranks_that_write_together_write_again_where_the_folder_was_deleted(tmp_path):
    assert run_ranks(_delete_while_ranks_write, 2, tmp_path / "run") == [3, 3]
    assert names(tmp_path / "run") == ["step-0000000002"]
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "whole.safetensors")]) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_another_run_has_made_again_is_left_to_it(tmp_path, impatient, asynchronous):
    folder, others = tmp_path / "run", []

    def replace(n):
        if n == 4:
            wait_for_writing()
            shutil.rmtree(folder)
            others.append(Ownership(folder, is_folder=True))

    with pytest.raises(ConfigError, match=r"is in use"):
        train(folder, before=replace, background=asynchronous)
    assert [name for name in names(folder) if not name.startswith(".")] in ([], ["step-0000000003"])
    others[0].release()


# -- a process that changes its place --------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_relative_folder_is_taken_from_where_fit_begins(tmp_path, monkeypatch, asynchronous):
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)

    def leave_home(n):
        if n == 4:
            os.chdir(away)

    leave("run", 6, before=leave_home, background=asynchronous)
    assert names(away) == []
    assert names(home) == ["run"]
    os.chdir(home)
    (found,) = [train("run", before=leave_home, background=asynchronous, keep=1)]
    assert same(found, train(None))
    assert names(away) == []
    assert names(home / "run") == ["step-0000000010"]


def test_a_relative_checkpoint_to_resume_from_is_one_of_where_fit_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave("run", 6)
    assert same(train("other", resume="run/step-0000000006"), train(None))
