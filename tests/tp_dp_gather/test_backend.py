"""The backend: the conformance kit, and its place among the others."""

import pytest
import torch
from torch import nn
from tp_core import LaunchEnvironment
from tp_core.plugins import Job
from tp_dp_gather import DataParallel
from tp_testing import BackendConformance

from tests.installed import backend_class

GatherBackend = backend_class("dp-gather")


class TestTwoDevices(BackendConformance):
    backend = GatherBackend
    devices = ("cpu", "cpu")


@pytest.mark.nightly
class TestThreeDevices(BackendConformance):
    backend = GatherBackend
    devices = ("cpu", "cpu", "cpu")


def job(count, **kwargs):
    return Job(devices=(torch.device("cpu"),) * count, environment=LaunchEnvironment.read(), **kwargs)


def test_it_ranks_below_a_backend_that_gathers_nothing_and_says_why():
    verdict = GatherBackend().assess(job(2))
    assert verdict.is_fit
    assert verdict.score < 60
    assert "every output travels to cpu" in verdict.reason
    assert "tp-tuple" in verdict.remedy


def test_it_does_not_fit_one_device_or_sharded_models():
    assert "one device, cpu" in GatherBackend().assess(job(1)).reason
    model = nn.Linear(2, 2)
    model.weight.tp_sharded = True
    assert "sharded" in GatherBackend().assess(job(2, model=model)).reason


def test_the_step_sees_the_whole_output_and_options_are_honoured():
    class Features(nn.Module):
        def forward(self, x):
            return {"y": x * 2, "kept": x}

    options = {"dp-gather": {"except_keywords": ("kept",)}}
    with GatherBackend().open(job(2, options=options)) as session:
        model = session.prepare_model(Features())
        assert isinstance(model, DataParallel)
        output = session.run(lambda model, batch: model(batch), model, torch.ones(5, 3))
        assert output["y"].shape == (5, 3)
        assert [p.shape[0] for p in output["kept"]] == [3, 2]
        assert isinstance(session.unwrap(model), Features)


def test_refreshing_a_model_lets_a_bare_write_reach_its_replicas():
    model = nn.BatchNorm1d(2).eval()
    with GatherBackend().open(job(2)) as session, torch.no_grad():
        prepared = session.prepare_model(model)
        prepared(torch.ones(4, 2))
        model.running_mean.data.add_(1)
        session.refresh(prepared)
        assert torch.equal(prepared(torch.ones(4, 2)), model(torch.ones(4, 2)))
