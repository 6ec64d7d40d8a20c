"""The memory that is predicted for an accelerator, and what its allocator takes in training."""

import gc

import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_trainer import Trainer

from tests.accelerator import KIND

# Width, layers, samples.
SMALL, MIDDLE, LARGE = (16, 40, 4), (64, 20, 8), (512, 6, 256)
DEEP, WIDE = (256, 24, 64), (1024, 4, 64)
# Few large tensors, whose segments have their own sizes; and many small ones.
WIDER, MANY = (1536, 4, 256), (128, 120, 64)


def make_model(width, layers):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def mean_square(model, batch):
    return model(batch).square().mean()


def predicted_and_measured(
    devices, backend, options, size, make_optimizer, rows, *, make_model=make_model, **training
):
    """Return the bytes that were predicted for tensors on a device, and the most that they had there.

    After these the same pair of what the allocator reserves for them.
    """
    width, layers, _ = size
    module = getattr(torch, KIND)
    device = torch.device(KIND, 0 if backend == "single" else LaunchEnvironment.read().rank)
    batch = torch.randn(rows, width)

    def trainer():
        return Trainer(
            backend=backend, devices=devices, progress=False, options={backend: options}, **training
        )

    with trainer() as predicting:
        model = make_model(width, layers)
        table = predicting.estimate(model, make_optimizer(model.parameters()), batch, mean_square)
        need = table.verdicts[backend].memory
    del model
    with trainer() as fitting:
        model = make_model(width, layers)
        # The first product of a thread takes a workspace on a card, which stays: cuBLAS's 32 MiB on an H200.
        nn.Linear(8, 8, device=device)(torch.ones(8, 8, device=device)).sum().backward()
        gc.collect()  # a model of an earlier test would be freed in between
        torch.accelerator.synchronize(device)
        module.empty_cache()
        before, reserved_before = module.memory_allocated(device), module.memory_reserved(device)
        module.reset_peak_memory_stats(device)
        optimizer = make_optimizer(model.parameters())
        loader = DataLoader([*batch] * training.get("accumulate", 1), batch_size=rows)
        fitting.fit(model, optimizer, loader, step=mean_square, epochs=3)
        measured = module.max_memory_allocated(device) - before
        reserved = module.max_memory_reserved(device) - reserved_before
    return (need.total, measured), (need.reserved, reserved)


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def adamw_one_by_one(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
