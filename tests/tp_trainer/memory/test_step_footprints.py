"""Footprints for numbers of samples: of many blocks they are computed from those of a few."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment
from tp_core.device_types import EXAMPLE
from tp_core.jobs import Footprint, replicated_memory
from tp_core.plugins import Job
from tp_trainer._footprints import StepFootprints, between  # private: `estimate` shows sums alone

from tests.models import Block


def test_what_lies_between_two_footprints_grows_in_a_straight_line():
    low, high = (
        Footprint(weights=8, gradients=8, activations=n, alone=n, kept={"block": n}) for n in (10, 30)
    )
    found = between(low, high, 0.5)
    assert (found.weights, found.activations, found.kept) == (8, 20, {"block": 20})


class Listed(nn.Sequential):
    """The blocks by their list, and by their numbers, of which not one may be missing."""

    def forward(self, x):
        return self[2](self[1](super().forward(x)) if len(self) > 2 else x)


def footprints_of(model):
    return StepFootprints(model, None, torch.ones(2, 8), lambda m, b: m(b).square().mean(), "fp32")


def blocks_of(footprint):
    return Counter(
        (what, nbytes, name) for what, _, nbytes, name in footprint.trace if what not in {"free", "value"}
    ) + Counter(nbytes for what, _, nbytes, _ in footprint.trace if what == "value")


def reserved_of(model, footprint):
    job = Job(devices=(torch.device(EXAMPLE, 0),), environment=LaunchEnvironment(), model=model)
    return replicated_memory(job, footprint).reserved


@pytest.mark.parametrize("kind", [nn.Sequential, Listed])
@pytest.mark.parametrize("what", ["nothing", "every block"])
def test_many_blocks_are_computed_from_a_few(kind, what):
    model = nn.Sequential(
        nn.Linear(8, 8), kind(*(Block(8, 32, activation=torch.relu) for _ in range(7))), nn.Linear(8, 50)
    )
    all_blocks, few = footprints_of(model), footprints_of(model)
    all_blocks._blocks = None
    expected, computed = all_blocks.measure(3, what), few.measure(3, what)
    assert (few._blocks is None) is (kind is Listed)
    traces = {"trace": (), "lower_trace": ()}
    assert replace(computed, **traces).to_dict() == replace(expected, **traces).to_dict()
    assert blocks_of(computed) == blocks_of(expected)
    assert reserved_of(model, computed) == reserved_of(model, expected) > 0
    assert list(computed.timeline) == list(expected.timeline)
