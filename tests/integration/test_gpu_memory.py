"""The memory that is predicted for stages and split tensors on accelerators, beside what is taken."""

import functools
import itertools

import pytest
import torch
import tp_shard as ts
from torch import nn

from tests.accelerator import GPU, SECOND, needs_two
from tests.predicted_memory import (
    DEEP,
    LARGE,
    MIDDLE,
    SMALL,
    WIDE,
    WIDER,
    adamw,
    predicted_and_measured,
)

pytestmark = [pytest.mark.gpu, needs_two]


class Blocks(nn.Module):
    """The same layers in a list, where stages are cut."""

    def __init__(self, width, layers):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("size", "microbatches"), [(LARGE, 4), (DEEP, 4), (WIDE, 2), (WIDER, 4)])
def test_the_fuller_of_two_stages_takes_what_is_predicted(pair, size, microbatches):
    options = {"ranks": 2, "microbatches": microbatches}
    run = functools.partial(predicted_and_measured, make_model=Blocks)
    found = pair.run(run, [GPU, SECOND], "pipeline", options, size, adamw, 2 * size[2])
    of_tensors, reserved = zip(*found, strict=True)
    assert of_tensors[0][0] == pytest.approx(max(measured for _, measured in of_tensors), rel=0.1)
    assert reserved[0][0] == pytest.approx(max(measured for _, measured in reserved), rel=0.1)


def split_model(width, layers):
    torch.manual_seed(0)
    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group()
    pairs = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    plan = {f"{i}.0": ts.Column() for i in range(layers)} | {f"{i}.2": ts.Row() for i in range(layers)}
    return ts.parallelize(nn.Sequential(*pairs, nn.Linear(width, 1)), plan)


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE, DEEP], ids=["small", "middle", "large", "deep"])
def test_each_part_of_split_tensors_takes_what_is_predicted(pair, size):
    run = functools.partial(predicted_and_measured, make_model=split_model)
    found = pair.run(run, [GPU, SECOND], "shard", {}, size, adamw, size[2])
    for predicted, measured in itertools.chain(*found):
        assert predicted == pytest.approx(measured, rel=0.1)


def model_with_a_whole_layer(width, layers):
    torch.manual_seed(0)
    if not ts.distributed.is_initialized():
        ts.distributed.init_process_group()
    pairs = [nn.Sequential(nn.Linear(width, 8), nn.Linear(8, width)) for _ in range(layers)]
    plan = {f"{i}.0": ts.Column() for i in range(layers)} | {f"{i}.1": ts.Row() for i in range(layers)}
    return ts.parallelize(nn.Sequential(*pairs, nn.Linear(width, width)), plan)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_the_comparison_of_the_first_gradients_is_predicted(pair):
    run = functools.partial(predicted_and_measured, make_model=model_with_a_whole_layer)
    found = pair.run(run, [GPU, SECOND], "shard", {}, (384, 1, 4), plain_sgd, 4)
    for predicted, measured in itertools.chain(*found):
        assert predicted == pytest.approx(measured, rel=0.1)
