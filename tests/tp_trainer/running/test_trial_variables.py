"""The variables that make a trial of any script: where it ends, where it saves, on which devices it runs."""

import pytest
from tp_core.errors import ConfigError, DeviceError
from tp_trainer import Trainer

from tests.tp_trainer.small_run import STEPS, same, train


def test_trials_end_and_save_where_variables_say_and_resume_there(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    monkeypatch.setenv("TP_CHECKPOINT", str(tmp_path / "trial"))
    monkeypatch.setenv("TP_MAX_STEPS", "3")
    first = train(tmp_path / "unused", resume=None)
    assert not (tmp_path / "unused").exists()
    assert max(path.name for path in (tmp_path / "trial").glob("step-*")) == "step-0000000003"
    assert not same(first, whole)
    monkeypatch.setenv("TP_MAX_STEPS", str(STEPS))
    assert same(train(tmp_path / "unused", resume=None), whole)


def test_a_trial_with_no_number_of_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_MAX_STEPS", "many")
    with pytest.raises(ConfigError, match="TP_MAX_STEPS has to be a number of steps above zero, got 'many'"):
        train(tmp_path)


def test_a_variable_names_devices_that_the_script_leaves_open(monkeypatch):
    monkeypatch.setenv("TP_DEVICES", "cpu,nothing")
    with pytest.raises(DeviceError, match="nothing"):
        Trainer(progress=False)
    Trainer(devices="cpu", progress=False)
