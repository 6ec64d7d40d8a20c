"""A run whose third step never ends on the last rank."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["run_hanging"]

_HEAD = """
import ctypes, os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Limits, Trainer

data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
rank = int(os.environ.get("RANK", 0))
seen = 0

def hangs_in_third_step(model, batch):
    global seen
    seen += 1
    if seen == 3 and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        HANG
    return nn.functional.mse_loss(model(batch[0]), batch[1])

import torch._dynamo  # the first step of an optimizer does so, which takes long on a busy machine

trainer = Trainer(seed=0, devices="cpu", progress=False)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
limits = Limits(step_timeout_s=20)
trainer.fit(model, optimizer, DataLoader(data, batch_size=8), step=hangs_in_third_step, limits=limits)
print("done", flush=True)
"""


def run_hanging(tmp_path: Path, hang: str, *launch: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_HEAD).replace("HANG", hang))
    command, env = [sys.executable, *launch, str(script)], os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=800, cwd=tmp_path, env=env, check=False
    )
