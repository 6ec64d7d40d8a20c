"""The adapter does what every collate adapter must do, and makes parts of equal lengths."""

from tp_testing import AdapterConformance, PluginConformance

from my_plugin import MyPluginAdapter


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"collate adapter": ("my-plugin",)}


class TestAdapter(AdapterConformance):
    adapter = MyPluginAdapter


def test_long_samples_are_spread() -> None:
    texts = ["a" * length for length in (100, 90, 3, 2, 2, 1)]
    parts = MyPluginAdapter().adapt("".join, parts=2)(texts)
    assert sorted(map(len, parts)) == [98, 100]


def test_what_has_no_length_does_not_fit() -> None:
    verdict = MyPluginAdapter().assess(3, 2)
    assert not verdict.is_fit
    assert verdict.reason == "a int has no length"
