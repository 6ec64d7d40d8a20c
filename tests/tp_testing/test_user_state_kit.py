"""The kit of users' state finds what is wrong with each of these backends."""

import copy

import pytest
from tp_core.errors import StepError
from tp_core.plugins import Backend, Session, Verdict
from tp_testing import UserStateConformance
from tp_testing import _user_state_conformance as kinds  # private: one kind for each mutant


class DropsHooks(Session):
    def prepare_model(self, model):
        for parameter in model.parameters():
            parameter._backward_hooks = None
        return model


class DropsAccumulatedHooks(Session):
    def prepare_model(self, model):
        for parameter in model.parameters():
            (parameter._post_accumulate_grad_hooks or {}).clear()
        return model


class DropsAttributes(Session):
    def prepare_model(self, model):
        for parameter in model.parameters():
            vars(parameter).clear()
        return model


class KeepsItsMemory(Session):
    def prepare_model(self, model):
        self.memory = [parameter.data for parameter in model.parameters()]
        return model

    def run(self, step, model, batch):
        for parameter, memory in zip(model.parameters(), self.memory, strict=True):
            parameter.data = memory
        return super().run(step, model, batch)


class CountsTwice(Session):
    def prepare_optimizer(self, optimizer):
        def count(optimizer, *_):
            for group in optimizer.param_groups:
                group["count"] = group.get("count", 0) + 1

        optimizer.register_step_pre_hook(count)
        return optimizer


class RunsTwice(Session):
    def run(self, step, model, batch):
        super().run(step, model, batch)
        return super().run(step, model, batch)


class ForgetsAttributes(Session):
    def run(self, step, model, batch):
        before = dict(vars(model))
        output = super().run(step, model, batch)
        vars(model).update(before)
        return output


class StopsSecondOptimizer(Session):
    optimizers = 0

    def prepare_optimizer(self, optimizer):
        self.optimizers += 1
        if self.optimizers > 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        return optimizer


class KeepsTheFirstGroups(Session):
    def prepare_optimizer(self, optimizer):
        groups = list(optimizer.param_groups)
        optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups.__setitem__(slice(None), groups))
        return optimizer


class ShowsACopy(Session):
    def prepare_model(self, model):
        self.copy = copy.deepcopy(model)
        return model

    def unwrap(self, model):
        return self.copy


class Crashes(Session):
    def prepare_optimizer(self, optimizer):
        raise AssertionError


class Refuses(Session):
    def prepare_optimizer(self, optimizer):
        msg = "take another backend"
        raise StepError(msg)


CAUGHT = [
    (DropsHooks, "gradient hooks before"),
    (DropsAccumulatedHooks, "accumulated gradient hooks before"),
    (DropsAttributes, "attributes"),
    (KeepsItsMemory, "data assigned in a callback"),
    (KeepsItsMemory, "data assigned by the optimizer"),
    (CountsTwice, "a number counted in a group"),
    (RunsTwice, "a count of the step's own"),
    (RunsTwice, "a list kept by forward"),
    (ForgetsAttributes, "a tensor kept by forward"),
    (StopsSecondOptimizer, "two optimizers of a model"),
    (KeepsTheFirstGroups, "a group added in a callback"),
    (ShowsACopy, "an average of torch"),
    (DropsHooks, "gradient hooks and two optimizers"),
    (DropsHooks, "gradient hooks, resumed"),
    (StopsSecondOptimizer, "two optimizers with one scale"),
    (Crashes, "attributes"),
    (Refuses, "nothing"),
]


def outcome(altered, kind, monkeypatch):
    class Altered(Backend):
        name = "altered"

        def assess(self, job):
            return Verdict.fits(1, "it is for tests")

        def open(self, job):
            return altered(job)

    class Kit(UserStateConformance):
        __test__ = False
        backend = Altered

    monkeypatch.setattr(kinds, "KINDS", {kind: kinds.KINDS[kind]})
    Kit().test_it_is_carried_or_refused(kind)


@pytest.mark.parametrize(("altered", "kind"), CAUGHT)
def test_an_altered_backend_is_caught_by_a_kind(altered, kind, monkeypatch):
    with pytest.raises(AssertionError):
        outcome(altered, kind, monkeypatch)


def test_a_refusal_passes(monkeypatch):
    outcome(Refuses, "attributes", monkeypatch)
