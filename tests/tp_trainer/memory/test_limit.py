"""Under a limit on each process, a model that copies cannot hold is trained by what "auto" chooses."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_testing import rank_outcomes, run_ranks
from tp_trainer import Trainer

from tests.reference_training import mean_square

pytestmark = pytest.mark.slow

M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH, BLOCKS = 2048, 12
MORE = 450 * 2**20
"""Beside the model's 200 MB: less than the 800 of a copy's states, more than the 400 of half of them."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.inner(x)


def limited():
    """Return a model, and leave this process little beside it."""
    torch.set_num_threads(1)
    # What is freed is given back: that the C library keeps it for later is not what this is about.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MORE, used + MORE))
    return model


def train(backend):
    model = limited()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(16, WIDTH)), batch_size=8)
    with Trainer(backend=backend, seed=0, progress=False) as trainer:
        history = trainer.fit(model, optimizer, loader, step=mean_square)
        verdicts = {c.name: (c.verdict.is_fit, str(c.verdict.memory)) for c in trainer.selection.candidates}
        return trainer.selection.chosen.name, verdicts, history[-1].metrics["loss"]


def test_auto_trains_what_ddp_cannot_hold():
    for chosen, verdicts, loss in run_ranks(train, 2, "auto", timeout_s=700):
        assert chosen == "fsdp"
        assert not verdicts["ddp"][0]
        assert "MiB" in verdicts["ddp"][1]
        assert loss > 0


@pytest.mark.filterwarnings("ignore:backend 'ddp':RuntimeWarning")
def test_ddp_that_is_asked_for_runs_out_of_memory_and_says_what_was_needed():
    ends = rank_outcomes(train, 2, "ddp", timeout_s=700)
    assert all(end.error is not None for end in ends)
    assert any("Memory has run out" in str(end) for end in ends)
