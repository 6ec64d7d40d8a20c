"""The engine does what every engine must do."""

from tp_core.testing import EngineConformance, PluginConformance

from my_plugin import MyPluginEngine


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"engine": ("my-plugin",)}


class TestEngine(EngineConformance):
    engine = MyPluginEngine
