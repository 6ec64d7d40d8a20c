"""Signals end a run after a step, with its state saved; what is resumed ends as if nothing had been."""

import functools
import os
import runpy
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import free_port, run_ranks
from tp_trainer import Interrupted, Trainer, Validation

from tests.reference_training import squared_error, train
from tests.tp_trainer import callback_run

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


def start(folder, send, at, *, ranks=1, to_rank=0, environ=None):
    """Run the program on some ranks, and return their statuses and what they wrote to stderr."""
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    port = str(free_port())
    arguments = [sys.executable, str(script), str(folder), send, str(at), str(to_rank)]
    processes = []
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        several = {k: str(v) for k, v in variables.items()} if ranks > 1 else {}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | several | (environ or {})
        processes.append(subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE))
    ends = [process.communicate(timeout=800)[1].decode() for process in processes]
    return [process.returncode for process in processes], ends


def finish(folder, ranks=1):
    """Run the program to its end on ranks that have loaded torch already."""
    folder.mkdir(exist_ok=True)
    script = folder / "program.py"
    script.write_text(PROGRAM)
    run_ranks(_run, ranks, script, ["none", "0", "0"])


def _run(script, arguments):
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            del os.environ[name]
    sys.argv = [str(script), str(script.parent), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def weights(folder):
    return torch.load(folder / "end.pt", weights_only=True)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights that a run on so many ranks ends with when nobody interrupts it."""

    @cache
    def run(ranks):
        folder = tmp_path_factory.mktemp(f"undisturbed-{ranks}")
        finish(folder, ranks)
        return weights(folder)

    return run


SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
test "$2" = 7_3 && exit 0
echo "Requested operation is presently disabled for job $2" >&2
exit 1
"""


@pytest.fixture
def slurm(tmp_path):
    """The variables of a Slurm job, with a command that writes down what Slurm was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "9"}


def asked(slurm):
    calls = Path(slurm["PATH"].split(os.pathsep)[0], "calls")
    return calls.read_text() if calls.exists() else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "status", "call"),
    [
        pytest.param("SIGTERM", 143, None, marks=pytest.mark.nightly),  # test_saving.py has a slow one
        ("SIGUSR1", 138, "requeue 7_3\n"),
        ("SIGINT", 130, None),
    ],
)
def test_a_signal_ends_the_run_saved_with_the_conventional_status(
    tmp_path, undisturbed, slurm, send, status, call
):
    environ = slurm | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    codes, (error,) = start(tmp_path / "cut", send, 20, environ=environ)
    assert codes == [status]
    assert "Traceback" not in error
    assert len(list((tmp_path / "cut" / "run").iterdir())) == 1
    assert asked(slurm) == call  # a job that was warned of its end goes back into the queue
    finish(tmp_path / "cut")
    assert same(weights(tmp_path / "cut"), undisturbed(1))


@pytest.mark.slow
@pytest.mark.parametrize("to_rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path, undisturbed, to_rank):
    codes, errors = start(tmp_path / "cut", "SIGTERM", 20, ranks=2, to_rank=to_rank)
    assert codes == [143, 143], errors
    finish(tmp_path / "cut", ranks=2)
    assert same(weights(tmp_path / "cut"), undisturbed(2))


@pytest.mark.slow
def test_a_job_that_slurm_does_not_let_back_into_its_queue_is_told_once(tmp_path, slurm):
    codes, errors = start(tmp_path / "cut", "SIGUSR1", 20, ranks=2, environ=slurm)
    assert codes == [138, 138]
    assert asked(slurm) == "requeue 9\n"
    assert "job 9 could not be put back into Slurm's queue: Requested operation is pres" in errors[0]
    assert "queue" not in errors[1]


HANGING = """
import signal, sys, time
import torch
from tp_trainer import Trainer

def step(model, batch):
    note = signal.getsignal(signal.SIGINT)

    def note_and_say(number, frame):
        note(number, frame)
        print("noted", flush=True)

    signal.signal(signal.SIGINT, note_and_say)
    print("hanging", flush=True)
    time.sleep(600)

with Trainer(progress=False, devices="cpu") as trainer:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.fit(model, optimizer, [torch.ones(1, 1)], step=step, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_that_hangs_in_a_step(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(HANGING)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"hanging\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"noted\n"  # the first waits for the step to end
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=800)
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()
        process.wait()


def own_validation(folder, by, *, signal_at=0, to_rank=0):
    """Train in a loop whose validation is a function; return the weights and its last results."""
    looked_at = 0
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))

    def step(model, batch):
        return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def looking(model, batch):
        nonlocal looked_at
        looked_at += 1
        if looked_at == signal_at and os.environ.get("RANK", "0") == str(to_rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": step(model, batch)} if by == "evaluate" else model(batch[0])

    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        model, loader = trainer.prepare(torch.nn.Linear(3, 1), DataLoader(TensorDataset(x), 4, shuffle=True))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        many = DataLoader(TensorDataset(x.repeat(25, 1)), 4)

        def validate():
            if by == "evaluate":
                return trainer.evaluate(model, many, step=looking)
            return {"largest": trainer.predict(model, many, looking).collect().max()}

        with trainer.loop(
            loader,
            epochs=2,
            state={"model": model, "optimizer": optimizer},
            validation=validate,
            checkpoint=folder,
            resume=folder and "auto",
        ) as loop:
            train(model, optimizer, loop, functools.partial(trainer.run, step), backward=trainer.backward)
        return [p.detach().clone() for p in model.parameters()], loop.history[-1].val


def _own_validation_cut_short(by, folder):
    whole, results = own_validation(None, by)
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    with pytest.raises(Interrupted) as ended:
        own_validation(folder, by, signal_at=5, to_rank=last)
    assert ended.value.checkpoint.name == "step-0000000004"  # saved before the rest was looked at
    again, repeated = own_validation(folder, by)
    return repeated == results and all(torch.equal(*pair) for pair in zip(again, whole, strict=True))


@pytest.mark.parametrize("by", ["evaluate", "predict"])
def test_a_signal_within_a_validation_of_ones_own_ends_it_between_two_batches(tmp_path, by, caplog):
    assert _own_validation_cut_short(by, tmp_path)
    assert "SIGTERM: the run ended after step 4" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("by", [pytest.param("evaluate", marks=pytest.mark.nightly), "predict"])
def test_a_signal_to_one_rank_within_a_validation_of_ones_own_ends_all(tmp_path, by):
    assert run_ranks(_own_validation_cut_short, 2, by, tmp_path) == [True, True]


def test_a_validation_that_draws_begins_anew_with_the_draws_that_it_had(tmp_path):
    looks = 0

    def noisy(model, batch):
        return squared_error(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    def interrupted(model, batch):
        nonlocal looks
        looks += 1
        if looks == 2:  # the first batch has drawn
            signal.raise_signal(signal.SIGTERM)
        return noisy(model, batch)

    def trained(step, folder=None):
        validation = Validation(DataLoader(callback_run.data(11), batch_size=4), step=step)
        model, history = callback_run.train([], step=noisy, validation=validation, folder=folder, epochs=3)
        return [p.detach().clone() for p in model.parameters()], [record.val["loss"] for record in history]

    weights, losses = trained(noisy)
    with pytest.raises(Interrupted):
        trained(interrupted, tmp_path)
    again, repeated = trained(noisy, tmp_path)
    assert repeated == losses
    assert all(torch.equal(*pair) for pair in zip(again, weights, strict=True))
