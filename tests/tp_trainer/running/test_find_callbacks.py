"""Which callbacks a run has."""

import logging
from types import SimpleNamespace

import pytest
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError, PluginError
from tp_core.plugins import NamedCallback, hookimpl
from tp_core.testing import fake_distribution
from tp_trainer import Callback
from tp_trainer._running._callbacks import find_callbacks  # private: plugins that are not installed


class Mine(Callback):
    pass


class Theirs(Callback):
    pass


@pytest.fixture
def plugins():
    plugins = PluginRegistry(environ={})

    def broken():
        raise RuntimeError("no sensor")

    brought = [
        NamedCallback("named", "help", Theirs),
        NamedCallback("always", "help", Theirs, joins=True),
        NamedCallback("broken", "help", broken, joins=True),
        NamedCallback("other", "help", lambda: 3),
    ]
    plugin = SimpleNamespace(tp_callbacks=hookimpl(specname="tp_callbacks")(lambda: brought))
    plugins.register(plugin, name="sensors")
    return plugins


def test_those_of_the_script_come_first_and_those_that_join_last(plugins, caplog):
    mine = Mine()
    with caplog.at_level(logging.WARNING):
        found, joined = find_callbacks([mine, "named"], plugins)
    assert [type(c) for c in found] == [Mine, Theirs, Theirs]
    assert found[0] is mine
    assert joined == {found[2]: "always"}
    assert "'broken' of sensors is left out: RuntimeError('no sensor')" in caplog.text


def test_one_that_is_named_does_not_join_again(plugins):
    found, joined = find_callbacks(["always"], plugins)
    assert len(found) == 1
    assert not joined


def test_an_installed_one_joins_unless_it_is_blocked_by_name(tmp_path):
    source = """
        from tp_core.plugins import Callback, NamedCallback, hookimpl

        class Sensor(Callback):
            def on_step_end(self, run):
                raise RuntimeError("no sensor")

        @hookimpl
        def tp_callbacks():
            return [NamedCallback("sensor", "help", Sensor, joins=True)]
    """
    modules = {"sensor_plugin": source}
    with fake_distribution(tmp_path, "sensors", entry_points={"sensors": "sensor_plugin"}, modules=modules):
        found, joined = find_callbacks([], PluginRegistry(environ={}))
        assert [type(c).__name__ for c in found] == ["Sensor"]
        assert list(joined.values()) == ["sensor"]
        blocked = PluginRegistry(environ={"TP_DISABLE_PLUGINS": "sensors"})
        assert find_callbacks([], blocked) == ([], {})
        with pytest.raises(ConfigError, match=r"called 'sensor'; .*TP_DISABLE_PLUGINS blocks sensors \("):
            find_callbacks(["sensor"], blocked)
        with pytest.raises(
            PluginError, match=r"plugin sensors \(.*is blocked by TP_DISABLE_PLUGINS; unset it"
        ):
            find_callbacks(["sensors"], blocked)


def test_each_run_gets_one_of_its_own(plugins):
    (first, *_), _ = find_callbacks(["named"], plugins)
    (second, *_), _ = find_callbacks(["named"], plugins)
    assert first is not second


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nmaed"], "no installed plugin brings a callback called 'nmaed'; did you mean 'named'"),
        (["broken"], "'broken' of sensors cannot be made.*no sensor"),
        (["other"], "must return a Callback, got int"),
        ([Mine], r"give an object: Mine\(\)"),
        ([3], "got int: 3"),
        (Mine(), "must be a list of callbacks"),
        ("named", "must be a list of callbacks"),
        ([Mine()] * 2, "Mine is given twice"),
    ],
)
def test_what_is_not_a_callback_is_refused(plugins, given, words):
    with pytest.raises(ConfigError, match=words):
        find_callbacks(given, plugins)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("on_batch_end", "on_step_end"),
        ("on_train_batch_end", "on_step_end"),
        ("on_train_begin", "on_fit_start"),
        ("on_train_epoch_end", "on_epoch_end"),
        ("on_epoch_begin", "on_epoch_start"),
        ("on_validaton_end", "on_validation_end"),
    ],
)
def test_a_method_for_an_event_that_does_not_exist_is_refused(plugins, given, meant):
    method = {given: lambda self, run: None}
    own, mixed = type("Own", (Callback,), method), type("Mixed", (type("Mixin", (), method), Callback), {})
    for kind in (own, mixed):
        with pytest.raises(ConfigError, match=f"has a method '{given}'.*did you mean '{meant}'"):
            find_callbacks([kind()], plugins)


def test_helpers_and_kept_functions_are_no_events(plugins):
    class Mine(Callback):
        on_cpu = True

        def __init__(self):
            self.on_better = print

        def _on_step(self):
            pass

    mine = Mine()
    assert find_callbacks([mine], plugins)[0][0] is mine
