"""The command does what every sub-command of tp must do, and prints the devices."""

import json

from tp_core import resolve_devices
from tp_core.testing import CommandConformance, PluginConformance
from typer.testing import CliRunner

from my_plugin import COMMAND, load_app


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"command": ("my-plugin",)}


class TestCommand(CommandConformance):
    command = COMMAND
    arguments = ("--json",)


def test_it_prints_the_devices_as_json() -> None:
    result = CliRunner().invoke(load_app(), ["--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [str(device) for device in resolve_devices("auto")]
