"""An adapter that is asked for by name, and whose plugin was left out."""

import pytest
import torch
from tp_core import LaunchEnvironment
from tp_core.errors import PluginError
from tp_core.plugins import Job
from tp_testing import fake_distribution
from tp_tuple import TupleOptions

from tests.installed import backend_class
from tests.run_tp import seen


def test_it_is_said_to_be_blocked(tmp_path, monkeypatch):
    job = Job(
        devices=(torch.device("cpu"),) * 2,
        environment=LaunchEnvironment.read({}),
        options={"tuple": TupleOptions(adapter="rows")},
    )
    rows = fake_distribution(
        tmp_path, "rows", entry_points={"rows": "rows_plugin"}, modules={"rows_plugin": ""}
    )
    monkeypatch.setenv("TP_DISABLE_PLUGINS", "rows")
    with (
        seen(rows),
        pytest.raises(PluginError, match=r"plugin rows .*is blocked by TP_DISABLE_PLUGINS; unset it"),
    ):
        backend_class("tuple")().open(job)
