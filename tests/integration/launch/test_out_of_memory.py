"""Memory runs out on one rank alone: all ranks end, and the table and what helps are printed once."""

import pytest

_SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

def limit(more):
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, -1))

backend, how = sys.argv[1:]
torch.set_num_threads(1)
limit(3 * 2**29)  # so that the model is large beside it, and what it needs is estimated
trainer = Trainer(backend=backend, devices="cpu", seed=0, progress=False)
seen = []

def step(model, batch):
    seen.append(batch)
    if len(seen) == 2 and trainer.rank == 1:
        if how == "fake":
            raise torch.OutOfMemoryError("CUDA out of memory")
        limit(2**27)
        return model(batch[0].repeat(2**18, 1)).square().mean()
    return model(batch[0]).square().mean()

model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024)) for _ in range(18)))
optimizer = torch.optim.AdamW(model.parameters())
trainer.fit(model, optimizer, DataLoader(TensorDataset(torch.ones(12, 1024)), 4), step=step)
"""


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        pytest.param("fsdp", "fake", marks=pytest.mark.slow),
        pytest.param("ddp", "limited", marks=pytest.mark.nightly),  # test_limit.py has a slow one
        pytest.param("fsdp", "limited", marks=pytest.mark.nightly),
        pytest.param("ddp", "fake", marks=pytest.mark.nightly),
    ],
)
def test_memory_that_runs_out_on_one_rank_ends_all_with_the_table(tp, backend, how):
    done = tp("launch", "-n", "2", tp.script(_SCRIPT), backend, how)
    assert done.returncode == 1
    _, _, block = done.stderr.rpartition("=" * 72 + "\nrank ")
    assert block.startswith("1 failed first: exit code 1")
    assert ("CUDA out of memory" if how == "fake" else "allocate") in block
    assert done.stderr.count("Memory has run out: less is needed with") == 1
    lines = [line.removeprefix("[rank1] ").strip() for line in done.stderr.splitlines()]
    (chosen,) = [line for line in lines if line.startswith(f"*  {backend} ")]
    assert "free on cpu: weights" in chosen
