"""What a session does by default: correct for one device in one process."""

import math

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment
from tp_core.errors import ConfigError
from tp_core.plugins import Job, Session


@pytest.fixture
def session():
    return Session(Job(devices=(torch.device("cpu"),), environment=LaunchEnvironment.read({})))


@pytest.fixture
def model():
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    made(torch.ones(4, 3)).sum().backward()
    return made


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def test_a_reduction_of_another_name_is_refused(session):
    with pytest.raises(ConfigError, match="takes 'sum', 'mean', 'min' or 'max', got 'avg'"):
        session.reduce(torch.ones(2), "avg")


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_mean_of_integers_is_floating_as_it_is_on_ranks(session, op):
    found = session.reduce(torch.tensor([3, 4]), op)
    torch.testing.assert_close(found, torch.tensor([3.0, 4.0]) if op == "mean" else torch.tensor([3, 4]))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_torchs_and_scales_nothing(session, model, norm_type):
    before = grads(model)
    expected = nn.utils.get_total_norm(before, norm_type)
    torch.testing.assert_close(session.grad_norm(model, norm_type=norm_type), expected)
    assert all(map(torch.equal, grads(model), before))


def test_clipping_to_no_limit_scales_nothing_even_where_the_norm_is_not_finite(session, model):
    model[0].weight.grad[0, 0] = math.inf
    before = grads(model)
    assert session.clip_grad_norm(model, math.inf) == math.inf
    assert all(map(torch.equal, grads(model), before))


def test_clipping_uses_the_norm_that_a_backend_computes(model):
    class Twice(Session):
        def grad_norm(self, model, *, norm_type=2.0):
            return 2 * super().grad_norm(model, norm_type=norm_type)

    session = Twice(Job(devices=(torch.device("cpu"),), environment=LaunchEnvironment.read({})))
    own = nn.utils.get_total_norm(grads(model))
    torch.testing.assert_close(session.clip_grad_norm(model, 1e-3), 2 * own)
    torch.testing.assert_close(nn.utils.get_total_norm(grads(model)), torch.tensor(5e-4), rtol=1e-3, atol=0)


def test_gradients_are_scaled_and_limited(session, model):
    before = grads(model)
    session.scale_gradients(model, 0.5)
    assert all(map(torch.equal, grads(model), [g / 2 for g in before]))
    session.clip_grad_value(model, 1e-3)
    assert all(map(torch.equal, grads(model), [(g / 2).clamp(-1e-3, 1e-3) for g in before]))


def test_a_parameter_that_is_not_finite_is_named_and_frozen_or_empty_ones_do_not_count(session):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "frozen": nn.Linear(1, 1), "empty": nn.Linear(1, 1)})
    model["frozen"].requires_grad_(requires_grad=False).weight.fill_(math.nan)
    model["empty"].weight = nn.Parameter(torch.empty(0, 1))
    assert session.find_nonfinite(model) is None
    with torch.no_grad():
        model["a"].bias[1] = math.nan
    assert session.find_nonfinite(model) == "a.bias"


def test_a_model_of_empty_parameters_has_norm_0_and_nothing_that_is_not_finite(session):
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.empty(0, 1))
    model(torch.ones(3, 1)).sum().backward()
    assert session.grad_norm(model, norm_type=math.inf) == 0
    assert session.find_nonfinite(model) is None
