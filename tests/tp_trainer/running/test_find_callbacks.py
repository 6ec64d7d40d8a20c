"""Which callbacks a run has."""

import logging
from types import SimpleNamespace

import pytest
import torch
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError, PluginError
from tp_core.plugins import NamedCallback, hookimpl
from tp_testing import fake_distribution
from tp_trainer import Callback, Trainer

CALLED = []


class Mine(Callback):
    def on_fit_start(self, run):
        CALLED.append(self)


class Theirs(Mine):
    pass


def called(given, plugins):
    """Return the callbacks of a run in their order."""
    CALLED.clear()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with Trainer(backend="single", devices="cpu", progress=False, plugins=plugins) as trainer:
        data = [torch.ones(1, 1)]
        trainer.fit(model, optimizer, data, step=lambda model, x: model(x).mean(), callbacks=given)
    return CALLED[:]


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
        found = called([mine, "named"], plugins)
    assert [type(c) for c in found] == [Mine, Theirs, Theirs]
    assert found[0] is mine
    assert "'broken' of sensors is left out: RuntimeError('no sensor')" in caplog.text


def test_one_that_is_named_does_not_join_again(plugins):
    assert len(called(["always"], plugins)) == 1


def test_an_installed_one_joins_unless_it_is_blocked_by_name(tmp_path, caplog):
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
        with caplog.at_level(logging.ERROR):
            called([], PluginRegistry(environ={}))
        assert "'sensor' failed in on_step_end" in caplog.text
        caplog.clear()
        blocked = PluginRegistry(environ={"TP_DISABLE_PLUGINS": "sensors"})
        called([], blocked)
        assert not caplog.text
        with pytest.raises(ConfigError, match=r"called 'sensor'; .*TP_DISABLE_PLUGINS blocks sensors \("):
            called(["sensor"], blocked)
        with pytest.raises(
            PluginError, match=r"plugin sensors \(.*is blocked by TP_DISABLE_PLUGINS; unset it"
        ):
            called(["sensors"], blocked)


def test_each_run_gets_one_of_its_own(plugins):
    (first, *_), (second, *_) = called(["named"], plugins), called(["named"], plugins)
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
        called(given, plugins)


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
            called([kind()], plugins)


def test_helpers_and_kept_functions_are_no_events(plugins):
    class Mine(Callback):
        on_cpu = True

        def __init__(self):
            self.on_better = print

        def _on_step(self):
            pass

    called([Mine()], plugins)
