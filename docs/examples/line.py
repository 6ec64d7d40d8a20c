"""The smallest whole job: a line is fitted, with checkpoints; the same on one device and on two hosts.

python line.py
tp launch -n 2 line.py
"""

import argparse
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, Trainer

x = torch.linspace(-1, 1, 64).reshape(64, 1)
loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16, shuffle=True)


def step(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", nargs="+", default="auto")
    parser.add_argument("--folder", default="run")
    options = parser.parse_args(arguments)
    with Trainer(devices=options.devices, seed=0, progress=False) as trainer:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = trainer.fit(
            model,
            optimizer,
            loader,
            step=step,
            epochs=options.epochs,
            checkpoint=Checkpoints(options.folder),
            resume="auto",
        )
        if trainer.is_main:
            print(trainer.selection)
            print(f"epoch {history[-1].epoch}, loss {history[-1].train['loss']:.6f}")


if __name__ == "__main__":
    main()
