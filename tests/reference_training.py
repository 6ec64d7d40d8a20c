"""Training on one device as plain PyTorch does it, and the steps that many tests train with.

What a backend, a resumed run or a loop of the trainer comes to is compared with this.
"""

import torch
from torch.utils.data import TensorDataset

__all__ = ["StoppedError", "mean_square", "rows_and_sums", "squared_error", "train"]


class StoppedError(Exception):
    """Raised by a step or a callback, to end a run in its middle."""


def squared_error(model, batch):
    """Return the mean squared error of what the model makes of the first part of a batch."""
    x, y = batch
    return (model(x) - y).square().mean()


def mean_square(model, batch):
    """Return the mean square of the outputs, for tests to which a target does not matter."""
    return model(batch[0]).square().mean()


def rows_and_sums(samples, columns=3, *, seed=2, dtype=torch.float64, curved=False):
    """Return drawn rows, each with its sum as the target; with ``curved`` with the sine of its sum."""
    x = torch.randn(samples, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    y = x.sum(1, keepdim=True)
    return TensorDataset(x, y.sin() if curved else y)


def train(model, optimizer, batches, step, *, backward=torch.Tensor.backward):
    """Make one optimizer step of each batch; ``backward`` is the trainer's where its own loop is tested."""
    for batch in batches:
        optimizer.zero_grad()
        backward(step(model, batch))
        optimizer.step()
