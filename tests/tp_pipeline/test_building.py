"""A model that the trainer builds is the one of a single device, of which each rank holds its stages."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_testing import RankPool, run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.live_bytes import resident

WIDTH = 128  # its matrices are large enough to be deferred
_M_MMAP_THRESHOLD = -3  # of malloc.h


class Net(nn.Module):
    """Has a table that is the head's too, and may call its layers in another order than it has them."""

    def __init__(self, is_backwards=False):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.is_backwards = is_backwards

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in reversed(self.layers) if self.is_backwards else self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def train(backend, *, is_backwards=False, options=None, **arguments):
    """Return losses, the weights before and after, and how many elements this rank had before."""
    torch.set_num_threads(1)
    chosen = {} if options is None else {"options": {backend: options}}
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False, **chosen) as trainer:
        model = trainer.build(lambda: Net(is_backwards).double())
        held = sum(p.numel() for p in model.parameters())
        states = [{n: t.clone() for n, t in trainer.session.model_state(model).items()}]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.randint(WIDTH, (14, 5), generator=torch.Generator().manual_seed(0))
        records = trainer.fit(
            model, optimizer, DataLoader(tokens, 8), step=step, epochs=2, clip_norm=0.5, **arguments
        )
        states.append({n: t.clone() for n, t in trainer.session.model_state(model).items()})
        return [record.train["loss"] for record in records], states, held


def assert_same(found, expected, tolerance=1e-12):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_ranks_build_their_stages_of_the_model_of_one_device(pair):
    for is_backwards in (False, True):  # then, the first step finds other stages than the model's order
        expected = train("single", is_backwards=is_backwards)
        for found in pair.run(lambda case=is_backwards: train("pipeline", is_backwards=case)):
            assert_same(found, expected)
            assert found[2] < 0.61 * expected[2]  # two of four layers, and the table, which both use


@pytest.mark.slow
def test_a_built_model_is_resumed_on_one_device_and_back(pair, tmp_path):
    def begun(backend, name, **model):
        train(backend, checkpoint=Checkpoints(str(tmp_path / name), every_steps=1), max_steps=3, **model)

    def ended(backend, name, **model):
        checkpoint = Checkpoints(str(tmp_path / name), every_steps=1)
        return train(backend, checkpoint=checkpoint, resume="auto", **model)

    losses, (_, weights), _ = train("single")
    pair.run(lambda: begun("pipeline", "there"))
    begun("single", "back")
    for found in [ended("single", "there"), *pair.run(lambda: ended("pipeline", "back"))]:
        assert found[0][-1] == pytest.approx(losses[-1], rel=1e-12)
        torch.testing.assert_close(found[1][1], weights, rtol=1e-12, atol=1e-12)
    begun("single", "other", is_backwards=True)  # the first step sends what optimizers keep, too
    _, (_, weights), _ = train("single", is_backwards=True)
    for found in pair.run(lambda: ended("pipeline", "other", is_backwards=True)):
        torch.testing.assert_close(found[1][1], weights, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("is_backwards", [False, True])
def test_data_ranks_share_the_weights_that_they_have_built(is_backwards):
    expected = train("single", is_backwards=is_backwards)
    options = {"ranks": 2, "data": "fsdp"}
    with RankPool(4) as four:
        for found in four.run(lambda: train("pipeline", is_backwards=is_backwards, options=options)):
            assert_same(found, expected)


def memory_of_building(width, layers):
    """Return the most memory that building took, and that of this rank's stages."""
    torch.set_num_threads(1)
    # What is freed goes back to the system at once: the peak is that of what is held, not of malloc's habits.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)

    def make(width, layers):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    with Trainer(backend="pipeline", devices="cpu", seed=0, progress=False) as trainer:
        trainer.build(lambda: make(WIDTH, 2))  # what is imported and started once is not the model's
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        model = trainer.build(lambda: make(width, layers))
        return resident("VmHWM") - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
def test_building_takes_little_more_memory_than_the_stages():
    for peak, stages in run_ranks(memory_of_building, 2, 1024, 48):
        assert 100 * 10**6 < stages < 102 * 10**6
        assert peak < 1.15 * stages, (peak, stages)
