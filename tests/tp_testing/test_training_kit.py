"""The kit of training finds what is wrong with each of these backends."""

import itertools
from contextlib import contextmanager

import pytest
from tp_core.errors import NonFiniteLossError
from tp_core.plugins import Backend, Session, Verdict
from tp_testing import TrainingConformance
from tp_testing import _training_conformance as runs  # private: one way for each mutant


class NeverScales(Session):
    def scale_gradients(self, model, factor):
        pass


class NeverLimits(Session):
    def clip_grad_value(self, model, limit):
        pass


class NeverClips(Session):
    def clip_grad_norm(self, model, max_norm, *, norm_type=2.0):
        return self.grad_norm(model, norm_type=norm_type)


class FindsEveryNormFinite(Session):
    def grad_norm(self, model, *, norm_type=2.0):
        return super().grad_norm(model, norm_type=norm_type).nan_to_num()

    def backward(self, loss, share=None):
        super().backward(loss.nan_to_num(), share)


class DropsGradientsOutsideOfSteps(Session):
    @contextmanager
    def no_sync(self, model):
        yield
        model.zero_grad()


class StandsStill(Session):
    def prepare_optimizer(self, optimizer):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
        return optimizer


class SkipsTheLastBatch(Session):
    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        return output * 0.5 if len(batch[0]) < 4 else output


class ForgetsMomenta(Session):
    def prepare_optimizer(self, optimizer):
        optimizer.state.clear()
        return optimizer


class KeepsTheFirstRate(Session):
    def prepare_optimizer(self, optimizer):
        rates = [group["lr"] for group in optimizer.param_groups]

        def take_back(optimizer, *_):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(take_back)
        return optimizer


CAUGHT = [
    (ForgetsMomenta, "two fits"),
    (KeepsTheFirstRate, "schedule"),
    (NeverScales, "accumulate"),
    (NeverLimits, "clip_value"),
    (NeverClips, "clip_norm"),
    (FindsEveryNormFinite, "nonfinite skip"),
    (DropsGradientsOutsideOfSteps, "accumulate"),
    (StandsStill, "plain"),
    (SkipsTheLastBatch, "plain"),
]


def kit_of(altered):
    class Altered(Backend):
        name = "altered"

        def assess(self, job):
            return Verdict.fits(1, "it is for tests")

        def open(self, job):
            return altered(job)

    class Kit(TrainingConformance):
        __test__ = False
        backend = Altered

    return Kit()


@pytest.mark.parametrize(("altered", "way"), [(Session, "plain"), *CAUGHT])
def test_an_altered_backend_is_caught_in_a_way_to_train(altered, way, monkeypatch):
    monkeypatch.setattr(runs, "CASES", {way: runs.CASES[way]})
    kit = kit_of(altered)
    if altered is Session:  # there is nothing wrong with it
        kit.test_it_leads_where_one_device_leads(way)
        return
    with pytest.raises((AssertionError, NonFiniteLossError)):
        kit.test_it_leads_where_one_device_leads(way)


class DrawsAnewInEverySession(Session):
    opened = itertools.count()

    def __init__(self, job):
        super().__init__(job)
        self.noise = 0.01 * next(self.opened)

    def run(self, step, model, batch):
        output = super().run(step, model, batch)
        return {**output, "loss": output["loss"] * (1 + self.noise)}


def test_a_backend_that_draws_numbers_of_its_own_does_not_resume_exactly(tmp_path):
    with pytest.raises(AssertionError):
        kit_of(DrawsAnewInEverySession).test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path)
