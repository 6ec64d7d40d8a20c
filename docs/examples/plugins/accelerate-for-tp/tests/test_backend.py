"""The backend does what every backend must do, but for the limits that are declared."""

import pytest
from tp_core.errors import ConfigError
from tp_testing import BackendConformance, PluginConformance, TrainingConformance, make_job

from accelerate_for_tp.backend import AccelerateBackend, AccelerateOptions


class TestPlugin(PluginConformance):
    plugin = "accelerate_for_tp._plugin"
    brings = {"backend": ("accelerate",)}


class TestBackend(BackendConformance):
    backend = AccelerateBackend
    processes = 2
    unused_options = {"find_unused_parameters": True}


class TestTraining(TrainingConformance):
    backend = AccelerateBackend
    processes = 2


def test_an_unknown_hook_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="comm_hook must be one of 'no', 'fp16'.*got 'fp8'"):
        AccelerateOptions(comm_hook="fp8")


def test_one_process_is_told_what_to_do() -> None:
    verdict = AccelerateBackend().assess(make_job(TestBackend()))
    assert not verdict.is_fit
    assert verdict.remedy == "tp launch -n 2 script.py"
