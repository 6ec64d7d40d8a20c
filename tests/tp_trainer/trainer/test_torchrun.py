"""torch's own launcher starts a script as well: the trainer needs no other package for that."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["tp_launch"] = None  # as where it is not installed
import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_core.plugins import registry
from tp_trainer import Trainer

assert "launch" not in {found.item.name for found in registry.commands()}
x = torch.linspace(-1, 1, 64).reshape(64, 1)
loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16, shuffle=True)

def step(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()

with Trainer(devices="cpu", seed=0, progress=False) as trainer:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer.fit(model, optimizer, loader, step=step, epochs=int(sys.argv[1]), checkpoint="run", resume="auto")
    if trainer.is_main:
        numbers = f"{model.weight.item():.1f} {model.bias.item():.1f}"
        print(trainer.selection.chosen.name, trainer.world_size, numbers)
"""


@pytest.mark.slow
def test_a_script_trains_and_resumes_under_torchrun_without_tp_launch(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TP_DISABLE_PLUGINS": "tp-launch"}
    for ranks, epochs in ((2, 20), (1, 30), (2, 40)):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, "script.py", str(epochs)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "ddp 2 3.0 1.0\n"
