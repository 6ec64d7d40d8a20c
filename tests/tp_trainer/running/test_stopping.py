"""A run ends soon after it is asked to, whatever its steps did before and do then."""

import gc
import json
import multiprocessing
import os
import signal
import time
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_core.plugins import Callback
from tp_testing import rank_outcomes, run_ranks
from tp_trainer import Checkpoints, Interrupted, Limits, Trainer, Validation

from tests.reference_training import mean_square

FAST = 30
DATA = TensorDataset(torch.ones(4 * 2000, 2))


class Steps:
    """Steps that are slow after the first ones, and do something in one of them."""

    def __init__(self, slow_s=0.0, *, act=lambda: None, acts=True):
        self.slow_s, self.act, self.acts, self.made = slow_s, act, acts, 0

    def __call__(self, model, batch):
        self.made += 1
        if self.made > FAST:
            time.sleep(self.slow_s)
        if self.made == FAST + 2 and self.acts:
            self.act()
        return mean_square(model, batch)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def fit(step, folder, *, backend="auto", loader=None, devices="cpu", shard=True, **options):
    with Trainer(seed=0, progress=False, devices=devices, backend=backend) as trainer:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(DATA, batch_size=4) if loader is None else loader
        if not shard:
            model, optimizer, loader = trainer.prepare(model, optimizer, loader, shard=False)
        return trainer.fit(model, optimizer, loader, step=step, checkpoint=folder, **options)


@pytest.mark.parametrize(
    "slow_s",
    [pytest.param(0.001, marks=pytest.mark.nightly), 0.01, pytest.param(0.1, marks=pytest.mark.nightly)],
    ids=["10 times", "100 times", "1000 times"],
)
def test_a_run_whose_steps_become_slower_ends_after_the_step_of_the_signal(tmp_path, slow_s):
    step = Steps(slow_s, act=terminate)
    with pytest.raises(Interrupted) as ended:
        fit(step, tmp_path)
    assert step.made == FAST + 2
    assert ended.value.checkpoint.name == f"step-{step.made:010}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "steps"), [("tuple", {(FAST + 2) // 2, (FAST + 2) // 2 + 1}), ("dp-gather", {FAST + 2})]
)
def test_so_does_one_over_several_devices_in_this_process(tmp_path, backend, steps):
    step = Steps(0.01, act=terminate)
    with pytest.raises(Interrupted) as ended:
        fit(step, tmp_path, backend=backend, devices="cpu,cpu")
    assert ended.value.checkpoint.name in {f"step-{n:010}" for n in steps}


class Stalling:
    """Batches of which one comes late, with a signal meanwhile."""

    def __init__(self, *, acts=True):
        self.acts = acts

    def __len__(self):
        return 2000

    def __iter__(self):
        for number in range(2000):
            if number == FAST and self.acts:
                terminate()
                time.sleep(0.2)
            yield (torch.ones(4, 2),)


def test_a_signal_while_the_loader_stalls_ends_the_run_with_the_next_step(tmp_path):
    step = Steps()
    with pytest.raises(Interrupted):
        fit(step, tmp_path, loader=Stalling())
    assert step.made == FAST + 1


def loop_until_stopped(folder, *, slow_s, act, backend="auto"):
    """Go over batches in a loop of our own, in which steps become slow; return how many steps it made."""
    with Trainer(seed=0, progress=False, devices="cpu", backend=backend) as trainer:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, batches = trainer.prepare(model, optimizer, DataLoader(DATA, batch_size=4))
        state = {"model": model, "optimizer": optimizer}
        made, saved = 0, None
        try:
            with trainer.loop(batches, epochs=1, checkpoint=folder, state=state) as loop:
                for batch in loop:
                    made += 1
                    time.sleep(slow_s if made > FAST else 0)
                    if made == FAST + 2:
                        act()
                    optimizer.zero_grad()
                    trainer.backward(trainer.run(mean_square, model, batch))
                    optimizer.step()
        except Interrupted as ended:
            saved = ended.checkpoint.name
    assert saved == f"step-{made:010}"
    return made


def test_an_own_loop_ends_after_the_step_of_the_signal_too(tmp_path):
    assert loop_until_stopped(tmp_path, slow_s=0.1, act=terminate) == FAST + 2


def test_no_step_begins_after_the_time_of_a_run(tmp_path):
    begun = []

    class Clock(Callback):
        def on_fit_start(self, run):
            begun.append(time.monotonic())

    def step(model, batch):
        begun.append(time.monotonic())
        if len(begun) > FAST:
            time.sleep(0.1)
        return mean_square(model, batch)

    fit(step, None, limits=Limits(max_time=0.3), epochs=None, callbacks=[Clock()])
    # One may begin later that was found to be in time: whatever the machine does between the two looks.
    assert sum(at > begun[0] + 0.3 for at in begun) <= 1


def test_a_checkpoint_is_written_after_the_step_in_which_it_came_due(tmp_path):
    due = []

    class Saved(Callback):
        def on_checkpoint_saved(self, run, path):
            if path.name != "step-0000000060":  # at the end
                due.append(run.step)

    step = Steps(0.01)
    settings = Checkpoints(tmp_path, every_s=0.05, every_epochs=None)
    fit(step, settings, max_steps=FAST + 30, epochs=None, callbacks=[Saved()])
    assert len(due) >= 4, "30 steps of at least 0.01 s each"


def test_the_record_of_a_run_says_how_long_it_took_to_end(tmp_path):
    with pytest.raises(Interrupted):
        fit(Steps(act=terminate), tmp_path / "run", log=["jsonl"])
    rows = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    (event,) = [row for row in rows if "interruption" in row.values()]
    assert 0 <= event["facts"]["seconds"] < 60


def test_an_interrupted_run_leaves_no_worker_of_its_loader_behind(tmp_path):
    def worker_ids():
        return {process.pid for process in multiprocessing.active_children()} - before

    before = {process.pid for process in multiprocessing.active_children()}
    gc.disable()  # what a cycle holds would else be freed now and then
    try:
        with pytest.raises(Interrupted) as ended:
            fit(Steps(act=terminate), tmp_path, loader=DataLoader(DATA, batch_size=4, num_workers=1))
        assert not worker_ids(), "although the exception is still there, with the frames of the run"
        assert ended.value.signal == signal.SIGTERM
    finally:
        gc.enable()


def test_no_cycle_keeps_the_workers_that_a_loader_has_for_all_epochs(tmp_path):
    def interrupted():
        train, val = (
            DataLoader(DATA, batch_size=size, num_workers=1, persistent_workers=True) for size in (4, 4000)
        )
        validation = Validation(val, step=mean_square, every_steps=20)
        with pytest.raises(Interrupted):
            fit(Steps(act=terminate), tmp_path, loader=train, validation=validation)

    before = {process.pid for process in multiprocessing.active_children()}
    gc.disable()
    try:
        interrupted()
        assert not {process.pid for process in multiprocessing.active_children()} - before
    finally:
        gc.enable()


# -- several ranks ------------------------------------------------------------------------------


def _late(folder, backend):
    """Return, for each case, how many steps were made after the one that asked for the end."""
    rank = int(os.environ["RANK"])
    cases = {f"{who} {slow_s}": (slow_s, who, slow_s) for slow_s in (0.01, 0.1) for who in (0, 1)}
    cases |= {"1 s": (1.0, 1, 1.0), "rank 0 is slow": (0.2, 1, 0.0), "rank 1 is slow": (0.0, 1, 0.2)}
    late = {}
    for name, (of_rank_0, who, of_rank_1) in cases.items():
        step = Steps((of_rank_0, of_rank_1)[rank], act=terminate, acts=rank == who)
        with pytest.raises(Interrupted) as ended:
            fit(step, folder / name, backend=backend)
        late[name] = step.made - FAST - 2, max(2, 0.5 / max(of_rank_0, of_rank_1))
        assert ended.value.checkpoint.name == f"step-{step.made:010}"
    return late


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_all_ranks_end_within_two_steps_of_a_signal_to_one(tmp_path, backend):
    late, other = run_ranks(_late, 2, tmp_path, backend)
    assert late == other
    assert all(0 <= steps <= most for steps, most in late.values()), late


def _late_otherwise(folder):
    """Return how late signals to rank 1 are where its loader stalls, and in loops of our own."""
    rank = int(os.environ["RANK"])
    step = Steps()
    with pytest.raises(Interrupted):
        fit(step, folder / "stalls", backend="ddp", loader=Stalling(acts=rank == 1), shard=False)
    late = [step.made - FAST - 1]
    for backend in ("ddp", "fsdp"):
        options = {"slow_s": 0.1, "act": terminate if rank else lambda: None, "backend": backend}
        late.append(loop_until_stopped(folder / backend, **options) - FAST - 2)
    return late


@pytest.mark.slow
def test_signals_while_a_loader_stalls_and_in_own_loops_are_as_early(tmp_path):
    late, other = run_ranks(_late_otherwise, 2, tmp_path)
    assert late == other
    assert 0 <= late[0] <= 500, "the rest of the epoch are 1970 steps, and 0.5 s of steps may be hundreds"
    assert all(0 <= steps <= 5 for steps in late[1:]), late


def _die_while_asked(folder):
    rank = int(os.environ["RANK"])
    fit(Steps(0.05, act=terminate if rank == 0 else lambda: os._exit(3)), folder, backend="ddp")


@pytest.mark.slow
def test_a_rank_that_dies_while_the_others_ask_lets_none_wait(tmp_path):
    asking, dead = rank_outcomes(_die_while_asked, 2, tmp_path, timeout_s=120.0)
    assert dead.exitcode == 3
    assert asking.error is not None, asking


def _ask(folder):
    """Have the faster rank ask for a checkpoint and an end, in a loop in which ranks exchange nothing."""
    rank, saved = int(os.environ["RANK"]), []
    with Trainer(seed=0, progress=False, devices="cpu", backend="ddp") as trainer:
        model, batches = trainer.prepare(torch.nn.Linear(2, 1), DataLoader(DATA, batch_size=4))

        class Saved(Callback):
            def on_checkpoint_saved(self, run, path):
                saved.append(run.step)

        options = {"state": {"model": model}, "callbacks": [Saved()], "checkpoint": folder, "epochs": 1}
        with trainer.loop(batches, **options) as loop:
            for _ in loop:
                time.sleep(0.3 if rank else 0.1)
                if rank == 0 and loop.step == 5:
                    loop.save()
                if rank == 0 and saved:
                    loop.stop("it is enough")
    return loop.step, saved


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_where_all_meet_chooses_no_other_place(tmp_path):
    (step, saved), other = run_ranks(_ask, 2, tmp_path)
    assert (step, saved) == other
    assert len(saved) == 2, "once for save(), once at the end"
    assert saved[0] < step < 20


def _every_s(folder):
    times = []

    class Saved(Callback):
        def on_checkpoint_saved(self, run, path):
            times.append(run.step)

    settings = Checkpoints(folder, every_s=0.5, every_epochs=None)
    fit(Steps(0.2), settings, backend="ddp", callbacks=[Saved()], epochs=None, limits=Limits(max_time="6s"))
    return times


@pytest.mark.slow
def test_ranks_save_and_end_by_the_clock_of_the_first(tmp_path):
    steps, other = run_ranks(_every_s, 2, tmp_path)
    assert steps == other
    slow = [step for step in steps if step > FAST + 1]
    # A step takes 0.2 s at least: the checkpoint of 0.5 s is due in the third, and known one step later.
    assert all(b - a <= 5 for a, b in pairwise(slow)), steps
    assert steps[-1] <= FAST + 6 / 0.2 + 2


def _validating(folder):
    """Signals within a validation of which ranks have different numbers of batches, or before it."""
    rank, found = int(os.environ["RANK"]), []
    for case, at in enumerate((1, 7, 40)):
        looked_at = 0

        def look(model, batch, at=at):
            nonlocal looked_at
            looked_at += 1
            time.sleep(0.05)  # so that a tenth of a second is few batches, on a busy machine, too
            if looked_at == at and rank == 1:
                terminate()
            return mean_square(model, batch)

        val_loader = DataLoader(TensorDataset(torch.ones(2 * 41 - 1, 2)), batch_size=2)
        with pytest.raises(Interrupted) as ended:
            fit(
                mean_square,
                folder / str(case),
                backend="ddp",
                validation=Validation(val_loader, step=look, every_steps=20),
            )
        found.append((looked_at - at if at < 30 else 0, ended.value.checkpoint.name))
    return found


@pytest.mark.slow
def test_a_signal_within_a_validation_ends_all_ranks_within_a_few_batches(tmp_path):
    for late, name in run_ranks(_validating, 2, tmp_path)[1]:
        assert name == "step-0000000020"
        assert late <= 15
