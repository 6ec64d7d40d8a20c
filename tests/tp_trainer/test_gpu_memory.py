"""The memory that is predicted for an accelerator, beside what its allocator hands out and reserves."""

import functools
import itertools

import pytest
from torch import nn

from tests.accelerator import GPU, SECOND, needs_two
from tests.predicted_memory import (
    DEEP,
    LARGE,
    MANY,
    MIDDLE,
    SMALL,
    WIDE,
    WIDER,
    adamw,
    adamw_one_by_one,
    momentum,
    predicted_and_measured,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make_optimizer", [adamw, adamw_one_by_one, momentum])
@pytest.mark.parametrize(
    "size", [SMALL, MIDDLE, LARGE, WIDER, MANY], ids=["small", "middle", "large", "wider", "many"]
)
def test_one_device_takes_what_is_predicted(size, make_optimizer):
    for predicted, measured in predicted_and_measured(GPU, "single", {}, size, make_optimizer, size[2]):
        assert predicted == pytest.approx(measured, rel=0.1)


@needs_two
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (MIDDLE, {}),
        (LARGE, {}),
        (DEEP, {}),
        (WIDER, {}),
        (MIDDLE, {"gradient_as_bucket_view": False}),
        (MANY, {"gradient_as_bucket_view": False}),
    ],
    ids=["middle", "large", "deep", "wider", "buckets of their own", "many, and buckets of their own"],
)
def test_each_of_two_copies_takes_what_is_predicted(pair, size, options):
    found = pair.run(predicted_and_measured, [GPU, SECOND], "ddp", options, size, adamw, 2 * size[2])
    for predicted, measured in itertools.chain(*found):
        assert predicted == pytest.approx(measured, rel=0.1)


ONCE, TWICE = {"reshard_after_forward": False}, {"reshard_after_forward": True}


@needs_two
@pytest.mark.parametrize(
    ("size", "options", "training"),
    [
        (SMALL, TWICE, {}),
        (MIDDLE, ONCE, {}),
        (LARGE, TWICE, {}),
        (DEEP, ONCE, {}),
        (WIDE, TWICE, {}),
        (LARGE, ONCE, {"precision": "bf16-mixed"}),
        (WIDE, TWICE, {"precision": "bf16-mixed"}),
        (LARGE, TWICE, {"accumulate": 2}),
        (DEEP, TWICE, {"accumulate": 2}),
        (WIDE, ONCE, {"accumulate": 2}),
        (WIDER, ONCE, {}),
        (MANY, TWICE, {}),
    ],
)
def test_each_of_two_shards_takes_what_is_predicted(pair, size, options, training):
    options = {"units": nn.Sequential, **options}
    run = functools.partial(predicted_and_measured, **training)
    found = pair.run(run, [GPU, SECOND], "fsdp", options, size, adamw, 2 * size[2])
    for predicted, measured in itertools.chain(*found):
        assert predicted == pytest.approx(measured, rel=0.05)
