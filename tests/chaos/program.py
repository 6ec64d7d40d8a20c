"""The program that chaos is brought upon: a small model with checkpoints, whose ranks kill themselves.

Arguments: the folder, how many kills, the seed of the chaos, how many epochs.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Trainer

BATCHES = 12


class Doom:
    """Kills this process at a random moment of each start, as often as it was told to."""

    def __init__(self, kills: int, seed: int) -> None:
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        fate = random.Random(f"{seed}/{start}")
        rank = fate.randrange(int(os.environ.get("WORLD_SIZE", "1")))
        self._left = fate.randint(1, BATCHES) if start < kills else -1
        self._is_mine = rank == int(os.environ.get("RANK", "0"))

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            self._left -= 1
            if self._left == 0 and self._is_mine:
                os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return (model(x) - y).square().mean()


def main(folder: Path, kills: int, seed: int, epochs: int) -> None:
    doom = Doom(kills, seed)
    x = torch.randn(BATCHES * 8 - 3, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        trainer.fit(
            model,
            optimizer,
            DataLoader(data, batch_size=8, shuffle=True),
            step=doom.step,
            epochs=epochs,
            val_loader=DataLoader(data, batch_size=16),
            checkpoint=Checkpoints(folder / "run", every_steps=2),
            resume="auto",
        )
        trainer.save_model(model, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
