"""An adapter that is asked for by name, and whose plugin was left out."""

import pytest
from tp_core.discovery import PluginRegistry
from tp_core.errors import PluginError
from tp_core.testing import fake_distribution
from tp_tuple import _loading


def test_it_is_said_to_be_blocked(tmp_path, monkeypatch):
    with fake_distribution(
        tmp_path, "rows", entry_points={"rows": "rows_plugin"}, modules={"rows_plugin": ""}
    ):
        monkeypatch.setattr(_loading, "registry", PluginRegistry(environ={"TP_DISABLE_PLUGINS": "rows"}))
        with pytest.raises(PluginError, match=r"plugin rows .*is blocked by TP_DISABLE_PLUGINS; unset it"):
            _loading.find_adapters("rows")
