"""State that is split over ranks is written by all of them, in threads if wanted; and when one cannot."""

import os
import resource
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StateError
from tp_testing import rank_outcomes, run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.run_tp import run

BOTH = pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=pytest.mark.slow)],
)


def train(folder, asynchronous, *, at=0, then=None, resume=None):
    """Train a split model for ten steps, with a checkpoint after every second one."""
    import tp_shard as ts

    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group()
    steps = 0

    def step(model, batch):
        nonlocal steps
        steps += 1
        if steps == at:
            then()
        return (model(batch[0]) - batch[0]).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(ts.nn.ParallelLinear(64, 64, dim=1), nn.Tanh(), ts.nn.ParallelLinear(64, 64, dim=0))
    loader = DataLoader(TensorDataset(torch.randn(40, 64, generator=torch.Generator())), batch_size=4)
    checkpoint = Checkpoints(folder, every_steps=2, every_epochs=None, keep=9, background=asynchronous)
    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer.fit(model, optimizer, loader, step=step, checkpoint=checkpoint, resume=resume)
        return {name: tensor.clone() for name, tensor in trainer.session.model_state(model).items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def after_writing(then):
    """Do something when the checkpoint of step 4 is written, and that of step 6 is not begun."""

    def wait():
        for thread in threading.enumerate():
            if thread.name == "tp-checkpoint":
                thread.join(800)
        then()

    return wait


def equal(found, expected):
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def with_a_quota_on_rank_1(folder, asynchronous):
    def limit():
        if os.environ["RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))

    with pytest.raises(OSError) as caught:  # noqa: PT011 - the words are looked at outside
        train(folder, asynchronous, at=6, then=after_writing(limit))
    left = names(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resumed = train(folder, asynchronous, resume="auto")
    return str(caught.value), left, equal(resumed, train(folder / "whole", asynchronous=False))


@BOTH
def test_a_rank_that_cannot_write_is_an_error_on_all_and_the_checkpoint_before_stays(tmp_path, asynchronous):
    for said, left, is_same in run_ranks(with_a_quota_on_rank_1, 2, tmp_path, asynchronous):
        assert "File too large" in said
        assert left == ["step-0000000002", "step-0000000004"]
        assert is_same


def while_rank_1_writes_slowly(folder):
    from tp_core.tensors._folder_writer import SafetensorsWriter

    may_write, write = threading.Event(), SafetensorsWriter.write_data

    def slow(self, *args):
        assert may_write.wait(800)
        return write(self, *args)

    if os.environ["RANK"] == "1":
        SafetensorsWriter.write_data = slow
    # The checkpoint of step 2 is not written before this, and that of step 4 waits for it.
    return train(folder, asynchronous=True, at=4, then=may_write.set)


@pytest.mark.slow
def test_training_goes_on_while_threads_write_a_split_state(tmp_path):
    run_ranks(while_rank_1_writes_slowly, 2, tmp_path)
    assert names(tmp_path)[-1] == "step-0000000010"


def killed_while_it_writes(folder, asynchronous):
    from tp_core.tensors._folder_writer import SafetensorsWriter

    def die(self, *args):
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        if os.environ["RANK"] == "1":
            SafetensorsWriter.write_data = die

    train(folder, asynchronous, at=6, then=after_writing(prepare))


@BOTH
def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path, asynchronous):
    alive, killed = rank_outcomes(killed_while_it_writes, 2, tmp_path, asynchronous)
    assert killed.exitcode == -signal.SIGKILL
    assert alive.error is not None, str(alive)
    assert names(tmp_path) == ["step-0000000002", "step-0000000004"]
    assert run(["convert", str(tmp_path), str(tmp_path / "whole.safetensors")]) == 0


def when_rank_1_fails_otherwise(folder, asynchronous):
    from tp_core.tensors._folder_writer import SafetensorsWriter

    def fail(*args):
        raise KeyError("surprise")

    def prepare():
        if os.environ["RANK"] == "1":
            SafetensorsWriter.write_data = fail

    with pytest.raises(StateError) as caught:
        train(folder, asynchronous, at=6, then=after_writing(prepare))
    return str(caught.value)


@pytest.mark.slow
@BOTH
def test_any_error_of_a_rank_that_writes_its_part_reaches_all(tmp_path, asynchronous):
    for said in run_ranks(when_rank_1_fails_otherwise, 2, tmp_path, asynchronous):
        assert "rank 1: 'surprise'" in said
    assert names(tmp_path) == ["step-0000000002", "step-0000000004"]
