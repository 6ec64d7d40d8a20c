"""Signals end a run after a step, with its state saved; what is resumed ends as if nothing had been."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from tp_core.testing import free_port

PROGRAM = """
import os, signal, sys, threading, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Trainer

folder, send, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def step(model, batch):
    global calls
    calls += 1
    if send != "none":
        time.sleep(0.02)
        if calls == at and os.environ.get("RANK", "0") == sys.argv[4]:
            os.kill(os.getpid(), getattr(signal, send))
    return (model(batch[0]) - batch[1]).square().mean()

x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
with Trainer(seed=1, progress=False, devices="cpu") as trainer:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer.fit(model, optimizer, loader, step=step, epochs=4, resume="auto",
                checkpoint=Checkpoints(folder + "/run", every_epochs=None))
    trainer.save_model(model, folder + "/end.pt")
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run(folder, send="none", at=0, *, ranks=1, to_rank=0, environ=None):
        (tmp_path / folder).mkdir(exist_ok=True)
        port = str(free_port())
        arguments = [sys.executable, str(script), str(tmp_path / folder), send, str(at), str(to_rank)]
        processes = []
        for rank in range(ranks):
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            several = {k: str(v) for k, v in variables.items()} if ranks > 1 else {}
            processes.append(
                subprocess.Popen(
                    arguments, env=os.environ | several | (environ or {}), stderr=subprocess.PIPE
                )
            )
        ends = [process.communicate(timeout=50)[1].decode() for process in processes]
        return [process.returncode for process in processes], ends

    return run


def weights(folder):
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.mark.parametrize(("send", "status"), [("SIGTERM", 143), ("SIGUSR1", 138), ("SIGINT", 130)])
def test_a_signal_ends_the_run_saved_with_the_conventional_status(run, tmp_path, send, status):
    assert run("whole") == ([0], [""])
    codes, (error,) = run("cut", send, 20)
    assert codes == [status]
    assert "Traceback" not in error
    assert len(list((tmp_path / "cut" / "run").iterdir())) == 1
    assert run("cut") == ([0], [""])
    found, expected = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
test "$2" = 7_3 && exit 0
echo "Requested operation is presently disabled for job $2" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("ranks", "send", "environ", "called", "said"),
    [
        (1, "SIGUSR1", {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "requeue 7_3\n", ""),
        (2, "SIGUSR1", {}, "requeue 9\n", "job 9 could not be put back into Slurm's queue: Requested op"),
        (1, "SIGTERM", {}, None, ""),
    ],
)
def test_a_warned_job_of_slurm_goes_back_into_the_queue(run, tmp_path, ranks, send, environ, called, said):
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    codes, errors = run("cut", send, 20, ranks=ranks, environ={"PATH": path, "SLURM_JOB_ID": "9", **environ})
    assert codes == [128 + getattr(signal, send)] * ranks
    assert said in errors[0]
    calls = tmp_path / "calls"
    assert (calls.read_text() if calls.exists() else None) == called
    assert len(list((tmp_path / "cut" / "run").iterdir())) == 1


@pytest.mark.parametrize("to_rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(run, tmp_path, to_rank):
    run("whole", ranks=2)
    codes, errors = run("cut", "SIGTERM", 20, ranks=2, to_rank=to_rank)
    assert codes == [143, 143], errors
    run("cut", ranks=2)
    found, expected = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


HANGING = """
import sys, time
import torch
from tp_trainer import Trainer

def step(model, batch):
    print("hanging", flush=True)
    time.sleep(60)

with Trainer(progress=False, devices="cpu") as trainer:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.fit(model, optimizer, [torch.ones(1, 1)], step=step, checkpoint=sys.argv[1])
"""


def test_a_second_interrupt_ends_a_run_that_hangs_in_a_step(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HANGING)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"hanging\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # the first waits for the step to end
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()
        process.wait()
