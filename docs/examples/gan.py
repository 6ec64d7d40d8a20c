"""A GAN: two models and two optimizers in a custom loop, saved as one run and resumed exactly.

On one device, on several of one process, or under a launcher:

    python gan.py
    tp launch -n 2 gan.py
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Trainer


class Discriminator(nn.Module):
    """Scores points: high for those of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def score(self, points: Tensor) -> Tensor:
        return self.body(points)


def disc_step(disc, gen, batch):
    (real,) = batch
    fake = gen(torch.randn_like(real)).detach()
    return softplus(-disc.score(real)).mean() + softplus(disc.score(fake)).mean()


def gen_step(gen, disc, batch):
    (real,) = batch
    return softplus(-disc.score(gen(torch.randn_like(real)))).mean()


def circle(n: int) -> TensorDataset:
    """Return points on a circle."""
    angle = torch.linspace(0, 2 * math.pi, n)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", default="gan-run")
    options = parser.parse_args()

    with Trainer(seed=0) as trainer:
        gen = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        gen, disc, batches = trainer.prepare(gen, Discriminator(), DataLoader(circle(512), 64, shuffle=True))
        opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3)
        opt_d = torch.optim.Adam(disc.parameters(), lr=4e-3)
        state = {"gen": gen, "disc": disc, "opt_g": opt_g, "opt_d": opt_d}
        checkpoint = Checkpoints(options.folder, every_steps=10)
        loop = trainer.loop(batches, epochs=options.epochs, state=state, checkpoint=checkpoint, resume="auto")
        with loop:
            for batch in loop:
                opt_d.zero_grad()
                loss_d = trainer.run(disc_step, disc, gen, batch)
                trainer.backward(loss_d)
                opt_d.step()
                opt_g.zero_grad()
                loss_g = trainer.run(gen_step, gen, disc, batch)
                trainer.backward(loss_g)
                opt_g.step()
                loop.log(loss_d=loss_d, loss_g=loss_g)
        if trainer.is_main:
            print(f"{loop.step} steps, loss of the discriminator {loop.metrics['loss_d']:.4f}")


if __name__ == "__main__":
    main()
