"""A model that the trainer builds is the one of a single device, of which each rank holds its slices."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import RankPool, run_ranks
from tp_trainer import Trainer

from tests.live_bytes import resident
from tests.reference_training import mean_square

WIDTH, BLOCKS = 192, 3
_M_MMAP_THRESHOLD = -3  # of malloc.h


class Net(nn.Module):
    def __init__(self, width=WIDTH, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(backend, precision="fp32"):
    """Return the first values, whether they are shards, and the losses of training on them."""
    with Trainer(backend=backend, devices="cpu", seed=4, precision=precision, progress=False) as trainer:
        model = trainer.build(Net)
        first = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        is_split = all(hasattr(p, "device_mesh") for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = torch.randn(12, 4, WIDTH, generator=torch.Generator().manual_seed(0))
        data = data.to(next(model.parameters()).dtype)
        history = trainer.fit(
            model, optimizer, DataLoader(TensorDataset(data), 4), step=mean_square, epochs=2
        )
        return first, is_split, [record.train["loss"] for record in history]


def as_usual(precision):
    torch.manual_seed(4)
    model = Net()
    return (model.bfloat16() if precision == "bf16-true" else model).state_dict()


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_ranks_build_the_model_of_one_device(pool, backend, precision):
    expected = as_usual(precision)
    _, _, losses = built("single", precision)
    for first, is_split, found in pool.run(built, backend, precision):
        assert is_split == (backend == "fsdp")
        assert list(first) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(first[name], tensor), name
        assert found == pytest.approx(losses, rel=1e-4 if precision == "fp32" else 0.05)


def test_one_device_builds_as_usual():
    first, is_split, _ = built("single")
    assert not is_split
    for name, tensor in as_usual("fp32").items():
        assert torch.equal(first[name], tensor), name


def memory_of_building(width, blocks):
    """Return the most memory that building took, that of this rank's slices, and of the largest unit."""
    torch.set_num_threads(1)
    # What is freed goes back to the system at once: the peak is that of what is held, not of malloc's habits.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    with Trainer(backend="fsdp", devices="cpu", seed=0, progress=False) as trainer:
        trainer.build(lambda: Net(16, 2))  # what is imported and started once is not the model's
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        model = trainer.build(lambda: Net(width, blocks))
        peak = resident("VmHWM") - before
        slices = sum(p.to_local().nbytes for p in model.parameters())
        unit = sum(p.nbytes for p in model.blocks[0].parameters())
        return peak, slices, unit


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak")
def test_building_takes_little_more_memory_than_the_slices_and_a_unit():
    for peak, slices, unit in run_ranks(memory_of_building, 2, 1024, 12):
        assert slices > 150 * 10**6
        assert peak < 1.15 * slices + unit, (peak, slices, unit)
