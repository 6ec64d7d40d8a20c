"""What a job needs of memory: the sentence, whether it fits, and what the selection makes of it."""

import dataclasses

import pytest
import torch
from tp_core import LaunchEnvironment
from tp_core.discovery import Contribution, select
from tp_core.errors import ConfigError, SelectionError
from tp_core.jobs import Footprint, MemoryNeed
from tp_core.plugins import Backend, Job, Session, Verdict

GIB = 2**30
NEED = MemoryNeed(
    weights=6 * GIB,
    gradients=6 * GIB,
    optimizer=12 * GIB,
    activations=13 * GIB + GIB // 4,
    free=23 * GIB,
    device="cuda:0",
    remedy="buy more",
)
FOOTPRINT = Footprint(
    weights=100, gradients=90, optimizer=180, update=20, activations=50, with_gradients=120, batch=5
)


def job(**values):
    return Job(devices=(torch.device("cpu"),), environment=LaunchEnvironment.read({}), **values)


def backend(name_, score, need=None):
    class Made(Backend):
        name = name_

        def assess(self, job):
            return Verdict.fits(score, f"it is {name_}")

        def open(self, job):
            return Session(job)

    if need is not None:
        Made.estimate_memory = lambda self, job: need
    return Contribution(Made(), name_, f"dist-{name_}", "1.0")


def test_a_need_is_one_sentence_with_its_parts():
    assert str(NEED) == (
        "needs 37.2 GiB of 23.0 free on cuda:0: weights 6.0, gradients 6.0, optimizer 12.0, "
        "activations about 13.2"
    )


def test_what_is_not_known_is_said():
    need = dataclasses.replace(NEED, activations=None, assumed="optimizer not known")
    assert str(need).startswith("needs at least 24.0 GiB of 23.0 free on cuda:0")
    assert str(need).endswith("activations unknown (optimizer not known)")
    assert not need.is_known


def test_small_needs_are_in_mebibytes():
    need = MemoryNeed(weights=2**20, gradients=2**20, optimizer=0, activations=0, free=2**29)
    assert str(need).startswith("needs 2 MiB of 512 free: weights 1")


def test_what_is_free_may_be_unknown():
    assert dataclasses.replace(NEED, free=None).fits
    assert not NEED.fits


def test_what_is_reserved_is_what_has_to_fit():
    need = dataclasses.replace(NEED, free=40 * GIB, reserved=41 * GIB)
    assert need.total < need.free
    assert not need.fits
    assert str(need).startswith("needs 37.2 GiB (41.0 reserved) of 40.0 free on cuda:0: weights")
    assert need.to_dict()["reserved"] == 41 * GIB
    assert dataclasses.replace(need, free=41 * GIB).fits


def test_what_is_reserved_is_not_asked_where_the_sum_does_not_fit():
    assert NEED.with_reserved(lambda: pytest.fail("it was asked")) == NEED
    fitting = dataclasses.replace(NEED, free=None)
    assert fitting.with_reserved(lambda: 1).reserved == fitting.total  # it is no less than the sum
    assert fitting.with_reserved(lambda: None).reserved is None


def test_negative_numbers_are_refused():
    with pytest.raises(ConfigError, match="weights of a MemoryNeed must not be negative, got -1"):
        MemoryNeed(weights=-1, gradients=0, optimizer=0)


def test_a_copy_needs_the_highest_point_of_the_step_or_of_the_update():
    need = Backend.estimate_memory(_any(), job(footprint=FOOTPRINT, free_nbytes=1000))
    assert (need.weights, need.gradients, need.optimizer) == (100, 90, 180)
    assert need.activations == 120 - 90 + 5  # gradients come while activations go
    need = Backend.estimate_memory(_any(), job(footprint=FOOTPRINT, accumulate=2))
    assert need.activations == 50 + 5  # gradients of the batch before are there all the time


def test_without_a_footprint_nothing_is_estimated():
    assert Backend.estimate_memory(_any(), job()) is None


def test_an_unknown_optimizer_is_assumed_to_keep_two_values():
    need = Backend.estimate_memory(_any(), job(footprint=Footprint(weights=10, gradients=8)))
    assert need.optimizer == 16
    assert "AdamW" in str(need)


def test_a_share_of_another_size_scales_what_depends_on_the_batch():
    twice = dataclasses.replace(FOOTPRINT, casts=10).with_batch_of(2)
    assert twice.activations == 10 + 2 * 40
    assert twice.batch == 10
    assert twice.weights == 100


def test_auto_takes_the_best_that_fits():
    big = backend("big", 80, NEED)
    small = backend("small", 20, dataclasses.replace(NEED, optimizer=0, activations=0))
    selection = select(job(), [big, small], environ={})
    assert selection.chosen.name == "small"
    assert "needs 37.2 GiB of 23.0 free" in str(selection)
    assert "buy more" in str(selection)
    assert selection.chosen.verdict.memory.fits


def test_what_does_not_fit_is_opened_if_it_is_asked_for():
    selection = select(job(), [backend("big", 80, NEED)], name="big", environ={})
    assert selection.chosen.verdict.lacks_memory


def test_where_nothing_fits_the_table_says_how_much_is_needed():
    with pytest.raises(SelectionError, match=r"(?s)needs 37\.2 GiB.*asked for by name is tried"):
        select(job(), [backend("big", 80, NEED)], environ={})


def _any():
    return backend("any", 1).item
