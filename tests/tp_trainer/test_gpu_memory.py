"""The memory that is predicted for an accelerator, beside what its allocator hands out."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_trainer import Trainer

from tests.accelerator import GPU, KIND, SECOND, needs_two

pytestmark = pytest.mark.gpu

SMALL, MIDDLE, LARGE = (16, 40, 4), (64, 20, 8), (512, 6, 256)  # width, layers, samples


def make_model(width, layers):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def mean_square(model, batch):
    return model(batch).square().mean()


def predicted_and_measured(devices, backend, options, size, make_optimizer, rows):
    """Return the bytes that were predicted for a device, and the most that tensors had there."""
    width, layers, _ = size
    module = getattr(torch, KIND)
    device = torch.device(KIND, 0 if backend == "single" else LaunchEnvironment.read().rank)
    batch = torch.randn(rows, width)

    def trainer():
        return Trainer(backend=backend, devices=devices, progress=False, options={backend: options})

    with trainer() as predicting:
        model = make_model(width, layers)
        table = predicting.estimate(model, make_optimizer(model.parameters()), batch, mean_square)
        predicted = table.verdicts[backend].memory.total
    with trainer() as training:
        model = make_model(width, layers)
        torch.accelerator.synchronize(device)
        module.empty_cache()
        before = module.memory_allocated(device)
        module.reset_peak_memory_stats(device)
        optimizer = make_optimizer(model.parameters())
        training.fit(model, optimizer, DataLoader(list(batch), batch_size=rows), step=mean_square, epochs=3)
        measured = module.max_memory_allocated(device) - before
    return predicted, measured


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def adamw_one_by_one(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [adamw, adamw_one_by_one, momentum])
@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE], ids=["small", "middle", "large"])
def test_one_device_takes_what_is_predicted(size, make_optimizer):
    predicted, measured = predicted_and_measured(GPU, "single", {}, size, make_optimizer, size[2])
    assert predicted == pytest.approx(measured, rel=0.1)


@needs_two
@pytest.mark.parametrize(
    ("size", "backend", "options"),
    [
        (MIDDLE, "ddp", {}),
        (LARGE, "ddp", {}),
        (MIDDLE, "ddp", {"gradient_as_bucket_view": False}),
        (MIDDLE, "fsdp", {"units": nn.Sequential}),
    ],
    ids=["ddp, middle", "ddp, large", "buckets of their own", "fsdp, middle"],
)
def test_each_of_two_ranks_takes_what_is_predicted(pair, size, backend, options):
    found = pair.run(predicted_and_measured, [GPU, SECOND], backend, options, size, adamw, 2 * size[2])
    for predicted, measured in found:
        assert predicted == pytest.approx(measured, rel=0.1)
