"""The engine does what every engine must do, and its workers are threads."""

import threading
from collections.abc import Callable
from typing import Any

from tp_core import resolve_devices
from tp_core.testing import EngineConformance, PluginConformance

from my_plugin.engine import MyPluginEngine


class TestPlugin(PluginConformance):
    plugin = "my_plugin._plugin"
    brings = {"engine": ("my-plugin",)}


class TestEngine(EngineConformance):
    engine = MyPluginEngine


def test_items_are_worked_on_at_the_same_time() -> None:
    meeting = threading.Barrier(2)  # passed by two threads together, or by none

    def worker(device: Any) -> Callable[[Any], int]:
        return lambda item: meeting.wait(timeout=60)

    with MyPluginEngine().open(worker, resolve_devices(["cpu", "cpu"]), options={}) as pool:
        assert sorted(pool.run(range(2))) == [0, 1]
