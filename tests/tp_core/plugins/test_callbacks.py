"""Callbacks that plugins bring: found, listed, blocked and left out like all else they bring."""

from types import SimpleNamespace

from tp_core.discovery import PluginRegistry
from tp_core.errors import ContractError
from tp_core.plugins import Callback, NamedCallback, hookimpl, registry

from tests.run_tp import doctor


def bringing(*callbacks):
    return SimpleNamespace(tp_callbacks=hookimpl(specname="tp_callbacks")(lambda: list(callbacks)))


def test_a_plugin_brings_a_callback_by_name():
    plugins = PluginRegistry(environ={})
    plugins.register(bringing(NamedCallback("energy", "joules", Callback)), name="power")
    (found,) = [c for c in plugins.callbacks() if c.item.name == "energy"]
    assert found.plugin == "power"
    assert isinstance(found.item.load(), Callback)
    assert not found.item.joins


def test_the_doctor_lists_it():
    registry.register(bringing(NamedCallback("energy", "joules", Callback)), name="power")
    try:
        (row,) = [row for row in doctor()["plugins"] if row["name"] == "power"]
    finally:
        registry.unregister("power")
    assert row["brings"] == {"callback": ["energy"]}


def test_a_bare_callback_is_not_what_the_hook_brings():
    plugins = PluginRegistry(environ={})
    plugins.register(bringing(Callback()), name="power")
    plugins.callbacks()
    (broken,) = plugins.broken()
    assert isinstance(broken.error, ContractError)
    assert "must return NamedCallback objects" in str(broken)


def test_no_event_of_the_base_class_does_anything():
    arguments = {"on_optimizer_step": 2, "on_validation_end": 2, "on_checkpoint_saved": 2}
    arguments |= {"on_interruption": 2, "on_exception": 2, "on_setup": 2}
    events = [name for name in vars(Callback) if name.startswith("on_")]
    assert len(events) > 10
    for event in events:
        assert getattr(Callback(), event)(*[None] * arguments.get(event, 1)) is None, event
