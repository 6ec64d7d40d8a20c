"""Every sub-command of this project does what the kit asks of those of others."""

import pytest
from tp_core.discovery import PluginRegistry
from tp_testing import CommandConformance

pytestmark = pytest.mark.nightly  # further cases of what the kit's own tests hold


class FirstParty(CommandConformance):
    """All but the jobs of a user need something to work on."""

    test_it_ends_well = None


for _found in PluginRegistry(environ={}).commands():
    _name = "Test" + _found.item.name.title().replace("-", "")
    globals()[_name] = type(_name, (FirstParty,), {"command": _found.item})


class TestJobs(CommandConformance):
    command = TestJobs.command  # noqa: F821 - from the loop above
    arguments = ("--json",)

    @pytest.fixture(autouse=True)
    def _no_jobs(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
