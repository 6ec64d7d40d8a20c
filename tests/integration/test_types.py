"""What type checkers see of the trainer: objects stay what they were, and steps are typed as users do."""

import subprocess
import sys

import pytest

PROGRAM = """
from typing import assert_type

from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from tp_trainer import History, Step, Trainer, launch

class Net(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x

def step(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model.encode(batch[0]).sum()

def named(model: Net, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": step(model, batch)}

def train(loader: DataLoader[tuple[Tensor, Tensor]], net: Net, optimizer: SGD) -> None:
    trainer = Trainer()
    prepared = trainer.prepare(net, optimizer, loader)
    assert_type(prepared, tuple[Net, SGD, DataLoader[tuple[Tensor, Tensor]]])
    assert_type(trainer.prepare(net), Net)
    assert_type(trainer.fit(net, optimizer, loader, step=step), History)
    trainer.fit(net, optimizer, loader, step=named, val_loader={"a": loader})
    trainer.evaluate(net, loader, step=named)
    one: Step = step

def work(x: int, *, y: int) -> str:
    return str(x + y)

assert_type(launch(work, 2, 1, y=2), list[str])
launch(work, 2, "no", y=2)  # type: ignore[arg-type]
"""


@pytest.mark.slow
def test_prepared_objects_keep_their_types_and_steps_may_name_a_subclass(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            tmp_path / "cache",
            tmp_path / "program.py",
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
