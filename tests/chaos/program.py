"""The program that chaos is brought upon: a small model with checkpoints, whose ranks kill themselves.

Its loaders have workers, which draw random numbers. Each kill is noted in the folder before it happens:
the file ``kills/<start>`` is of the rank that killed itself in that start.

Arguments: the folder, how many kills, the seed of the chaos, how many epochs.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Checkpoints, Trainer

BATCHES = 12


class Doom:
    """Kills this process at a random moment of each start, as often as it was told to."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        fate = random.Random(f"{seed}/{start}")
        rank = fate.randrange(int(os.environ.get("WORLD_SIZE", "1")))
        self._left = fate.randint(1, BATCHES) if start < kills else -1
        self._note = folder / "kills" / str(start)
        self._is_mine = rank == int(os.environ.get("RANK", "0"))

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            self._left -= 1
            if self._left == 0 and self._is_mine:
                self._note.parent.mkdir(exist_ok=True)
                self._note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return (model(x) - y).square().mean()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are augmented at random, with torch's generator and Python's."""

    def __init__(self) -> None:
        self._x = torch.randn(BATCHES * 8 - 3, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[index] + 0.1 * torch.randn(4) + 0.1 * random.random()
        return x, x.sum(0, keepdim=True).sin()


def main(folder: Path, kills: int, seed: int, epochs: int) -> None:
    doom = Doom(folder, kills, seed)
    data = Noisy()
    with Trainer(seed=1, progress=False, devices="cpu") as trainer:
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        trainer.fit(
            model,
            optimizer,
            DataLoader(data, batch_size=8, shuffle=True, num_workers=2),
            step=doom.step,
            epochs=epochs,
            val_loader=DataLoader(data, batch_size=16, num_workers=1, persistent_workers=True),
            checkpoint=Checkpoints(folder / "run", every_steps=2),
            resume="auto",
        )
        trainer.save_model(model, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
