"""Workers of prepared loaders outlive the signals that end a run, and end when the run does."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise

import psutil
import pytest
from torch.utils.data import DataLoader
from tp_core.data import PreparedLoader

from tests.own_words import own_words

PROGRAM = """
import multiprocessing, os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from tp_core.data import PreparedLoader

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

class Pids:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor([os.getpid()])

class Sleepy(Pids):
    def __getitem__(self, index):
        if index > 3:
            time.sleep(600)
        return super().__getitem__(index)

def to_file(number, frame):
    with open("heard", "a") as file:
        file.write("x")

def listen(worker):
    signal.signal(signal.SIGUSR1, to_file)

def prepared(data, **options):
    return PreparedLoader(DataLoader(data, batch_size=2, num_workers=2, **options))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program in a process group of its own, of which nothing is left in the end."""
    started = []

    def run(body, *arguments):
        path = tmp_path / "program.py"
        main = textwrap.indent(textwrap.dedent(body), "    ")
        path.write_text(f'{PROGRAM}\nif __name__ == "__main__":\n{main}')
        command = [sys.executable, "-W", "error", str(path), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes))
        return started[-1]

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids):
    deadline = time.monotonic() + 800
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("fork", False),
        ("spawn", True),
        pytest.param("forkserver", False, marks=pytest.mark.nightly),
        pytest.param("fork", True, marks=pytest.mark.nightly),
        pytest.param("spawn", False, marks=pytest.mark.nightly),
        pytest.param("forkserver", True, marks=pytest.mark.nightly),
    ],
)
def test_an_own_loop_whose_group_is_signalled_goes_on_with_its_workers(start, method, kept):
    process = start(
        """
        if __name__ == "__main__":
            heard = []
            for number in SIGNALS:
                signal.signal(number, lambda number, _: heard.append(number))
            kept = sys.argv[2] == "True"
            loader = prepared(Pids(), multiprocessing_context=sys.argv[1], persistent_workers=kept)
            for epoch in range(2):
                pids = []
                for batch in loader:
                    pids += batch.flatten().tolist()
                    if len(pids) in (2, 20):
                        for number in SIGNALS:
                            os.killpg(0, number)
                assert len(pids) == 40 and len(set(pids)) == 2, pids
            assert set(heard) == set(SIGNALS), heard
        """,
        method,
        str(kept),
    )
    out, err = process.communicate(timeout=800)
    assert (process.returncode, out, own_words(err)) == (0, "", "")


@pytest.mark.slow
def test_what_a_worker_init_fn_listens_to_is_heard(start, tmp_path):
    process = start(
        """
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for batch in prepared(Pids(), worker_init_fn=listen):
            os.killpg(0, signal.SIGUSR1)
        """
    )
    out, err = process.communicate(timeout=800)
    assert (process.returncode, out, own_words(err)) == (0, "", "")
    assert (tmp_path / "heard").stat().st_size >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("fork", marks=pytest.mark.nightly),
        pytest.param("spawn", marks=pytest.mark.nightly),
        "forkserver",
    ],
)
def test_workers_that_hang_after_a_signal_end_with_the_process_that_was_killed(start, method):
    process = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for batch in prepared(Sleepy(), multiprocessing_context=sys.argv[1]):
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            os.killpg(0, signal.SIGTERM)
        """,
        method,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert process.stdout.readline()  # the signal has been sent, and outlived, for a second time
    process.kill()
    wait_until_gone(*pids)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_workers_of_a_fork_server_and_the_server_end_with_the_program_that_was_killed(start, persistent):
    process = start(
        """
        loader = prepared(Pids(), multiprocessing_context="forkserver", persistent_workers="True" in sys.argv)
        for batch in loader:
            workers = [child.pid for child in multiprocessing.active_children()]
            print(multiprocessing.forkserver._forkserver._forkserver_pid, *workers, flush=True)
            time.sleep(600)
        """,
        str(persistent),
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.kill()
    wait_until_gone(*pids)


@pytest.mark.slow
def test_a_program_ends_quietly_while_its_workers_hang(start):
    process = start(
        """
        loader = prepared(Sleepy(), persistent_workers=True)
        batches = iter(loader)
        next(batches)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        """
    )
    out, err = process.communicate(timeout=800)
    assert (process.returncode, own_words(err)) == (0, "")
    wait_until_gone(*map(int, out.split()))


@pytest.mark.slow
def test_other_children_of_the_fork_server_end_when_they_are_asked_to(start):
    process = start(
        """
        if __name__ == "__main__":
            next(iter(prepared(Pids(), multiprocessing_context="forkserver")))
            for asked_at_once in (True, False):
                child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
                child.start()
                if not asked_at_once:
                    time.sleep(1)
                child.terminate()
                child.join(800)
                print(child.exitcode)
        """
    )
    out, err = process.communicate(timeout=800)
    assert (out, own_words(err)) == ("-15\n-15\n", "")


@pytest.mark.slow
def test_workers_that_have_ended_leave_nothing_to_the_garbage_collector():
    loader = PreparedLoader(DataLoader(list(range(4)), num_workers=2))
    process = psutil.Process()
    open_files = []
    gc.disable()
    try:
        for _ in range(6):
            assert len(list(loader)) == 4
            open_files.append(process.num_fds())
    finally:
        gc.enable()
    # What is left would grow each time; what other threads of the tests open does not.
    assert any(before >= after for before, after in pairwise(open_files)), open_files


def initialize(worker):
    pass


def test_the_users_loader_is_left_as_it_was():
    data = list(range(8))
    loader = DataLoader(data, num_workers=1, worker_init_fn=initialize, batch_sampler=None, batch_size=None)
    assert len(list(PreparedLoader(loader, shard=False))) == 8
    assert loader.worker_init_fn is initialize
    assert loader.multiprocessing_context is None


class _OwnContext(multiprocessing.context.ForkContext):
    class Process(multiprocessing.context.ForkProcess):
        pass


def test_processes_of_the_users_own_kind_are_left_alone():
    context = _OwnContext()
    loader = DataLoader(list(range(8)), num_workers=1, multiprocessing_context=context)
    batches = iter(PreparedLoader(loader))
    next(batches)
    assert _OwnContext.Process in {type(child) for child in multiprocessing.active_children()}
