"""Finding plugins, and surviving the broken ones."""

import sys
from textwrap import dedent
from types import SimpleNamespace

import pytest
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.discovery import PluginRegistry
from tp_core.errors import ContractError, DuplicateNameError, PluginError
from tp_core.plugins import Backend, Command, Job, Session, Verdict, hookimpl
from tp_testing import fake_distribution


class Mine(Backend):
    name = "mine"

    def assess(self, job):
        return Verdict.fits(60, "it is mine")

    def open(self, job):
        return Session(job)


BACKEND_SOURCE = """
    from tp_core.plugins import Backend, Session, Verdict
    from tp_core.plugins import hookimpl

    tp_contract = {contract}

    class Other(Backend):
        name = {name!r}
        def assess(self, job):
            return Verdict.fits(70, "installed")
        def open(self, job):
            return Session(job)

    @hookimpl
    def tp_backends():
        return [Other]
"""


def source(name="other", contract=1):
    return BACKEND_SOURCE.format(name=name, contract=contract)


def registry(**environ):
    return PluginRegistry(environ=environ)


def names(contributions):
    return [c.item.name for c in contributions]


def test_an_installed_backend_is_found_with_its_origin(tmp_path):
    with fake_distribution(
        tmp_path,
        "tp-other",
        version="2.3",
        entry_points={"other": "other_plugin"},
        modules={"other_plugin": source()},
    ):
        plugins = registry()
        (found,) = [c for c in plugins.backends() if c.item.name == "other"]
    assert (found.plugin, found.distribution, found.version) == ("other", "tp-other", "2.3")
    assert "other (tp-other 2.3)" in [str(p) for p in plugins.plugins()]


def test_nothing_is_imported_before_it_is_asked_for(tmp_path):
    with fake_distribution(
        tmp_path,
        "tp-lazy",
        entry_points={"lazy": "lazy_plugin"},
        modules={"lazy_plugin": source("lazy")},
    ):
        plugins = registry()
        assert "lazy_plugin" not in sys.modules
        plugins.plugins()
        assert "lazy_plugin" in sys.modules


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("this is no python", "SyntaxError"),
        (source("old", contract=99), "built for version 99 of the hook contract"),
        (
            "from tp_core.plugins import hookimpl\n@hookimpl\ndef tp_bakends():\n    return []\n",
            "breaks the hook contract",
        ),
        (
            "from tp_core.plugins import hookimpl\n@hookimpl\ndef tp_backends(job):\n    return []\n",
            "breaks the hook contract",
        ),
        (
            "from tp_core.plugins import hookimpl\n@hookimpl\ndef tp_backends():\n    return [3]\n",
            "must return Backend objects, got int",
        ),
        (
            "from tp_core.plugins import hookimpl\n@hookimpl\ndef tp_backends():\n    1 / 0\n",
            "ZeroDivisionError",
        ),
        (source(""), "needs a name"),
        ("import bad_plugin_too\nfrom bad_plugin import missing\n", "No module named 'bad_plugin_too'"),
        ("from bad_plugin import missing\n", "partially initialized module 'bad_plugin'"),
        ("import pytest\npytest.skip('not here', allow_module_level=True)\n", "Skipped: not here"),
        ("class Mine(BaseException): pass\nraise Mine('of nobody')\n", "Mine: of nobody"),
        ("raise GeneratorExit('early')\n", "GeneratorExit: early"),
        ("raise RecursionError('too deep')\n", "RecursionError: too deep"),
        (
            "class E(Exception):\n    def __str__(self): raise LookupError\nraise E\n",
            "E with a message that cannot be read (LookupError)",
        ),
        ("def __getattr__(name):\n    raise RuntimeError(name)\n", "RuntimeError: tp_contract"),
        ("def __dir__():\n    raise RuntimeError('nothing to see')\n", "RuntimeError: nothing to see"),
        (source("old", contract=0), "built for version 0 of the hook contract"),
        (source("old", contract="'1'"), "must declare tp_contract as a whole number, got '1'"),
        (source("old", contract=[1]), "must declare tp_contract as a whole number, got [1]"),
        (
            source("x").replace("return [Other]", "return None"),
            "must return a list of Backend objects, got NoneType",
        ),
        (source("x").replace("[Other]", "Other()"), "must return a list of Backend objects, got the backend"),
        (source("x").replace("@hookimpl", ""), "tp_backends that is no hook: decorate it with @hookimpl"),
        (source("x").replace("return [Other]", "return 'other'"), "got str: 'o'"),
        (source("x").replace("return [Other]", "yield 1 / 0"), "ZeroDivisionError"),
        (source("x").replace("def open", "def opens"), "needs the methods open"),
        (
            source("x").replace("name = 'x'", "name = property(lambda self: 'x')"),
            "a string and not empty, and no property",
        ),
        (
            source("x").replace("name = 'x'", "name = type('S', (str,), {'__hash__': None})('x')"),
            "unhashable type: 'S'",
        ),
        (
            source("x").replace(
                "class Other(Backend)",
                "class Other(metaclass=type('M', (type,), {"
                "'__instancecheck__': lambda c, o: True, '__subclasscheck__': lambda c, o: 1 / 0}))",
            ),
            "must return Backend objects",
        ),
        (
            source("x").replace("return [Other]", "return [type('R', (), {'__repr__': lambda r: 1 / 0})()]"),
            "ZeroDivisionError",
        ),
        (
            "from tp_core.plugins import hookimpl\n@hookimpl\ndef tp_backends():\n    raise SystemExit(3)\n",
            "SystemExit: 3",
        ),
    ],
)
def test_a_broken_plugin_is_reported_and_the_others_live_on(tmp_path, text, error):
    with (
        fake_distribution(
            tmp_path,
            "tp-bad",
            version="0.9",
            entry_points={"bad": "bad_plugin"},
            modules={"bad_plugin": text},
        ),
        fake_distribution(
            tmp_path,
            "tp-good",
            entry_points={"good": "good_plugin"},
            modules={"good_plugin": source("good")},
        ),
    ):
        plugins = registry()
        (broken,) = plugins.broken()
        assert "good" in names(plugins.backends())
        assert error in str(broken) + broken.traceback
        assert "bad (tp-bad 0.9) is broken" in str(broken)
        assert "Traceback" in broken.traceback or "Error" in broken.traceback
        with pytest.raises(PluginError, match="it was left out") as caught:
            plugins.require("bad")
        assert caught.value.__cause__ is broken.error


def test_an_interruption_is_no_fault_of_a_plugin_and_the_next_question_looks_again(tmp_path):
    interrupted = "os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)"
    text = f"import os, signal, time\nif 'SLOW_PLUGIN' in os.environ:\n    {interrupted}\n" + dedent(
        source("slow")
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_distribution(
            tmp_path, "tp-slow", entry_points={"slow": "slow_plugin"}, modules={"slow_plugin": text}
        ),
    ):
        plugins = registry()
        patch.setenv("SLOW_PLUGIN", "1")
        with pytest.raises(KeyboardInterrupt):
            plugins.backends()
        patch.delenv("SLOW_PLUGIN")
        assert "slow" in names(plugins.backends())
        assert plugins.broken() == ()


def test_two_plugins_of_one_name_keep_the_first_and_report_the_second(tmp_path):
    with (
        fake_distribution(
            tmp_path, "tp-a", entry_points={"same": "a_plugin"}, modules={"a_plugin": source("x")}
        ),
        fake_distribution(
            tmp_path, "tp-b", entry_points={"same": "b_plugin"}, modules={"b_plugin": source("y")}
        ),
    ):
        plugins = registry()
        (broken,) = plugins.broken()
        assert isinstance(broken.error, DuplicateNameError)
        assert "'tp-a'" in str(broken)
        assert "'tp-b'" in str(broken)
        assert "x" in names(plugins.backends())


@pytest.mark.parametrize("blocked", ["other", "tp-other", "else, tp-other"])
def test_a_blocked_plugin_is_not_loaded(tmp_path, blocked):
    with fake_distribution(
        tmp_path,
        "tp-other",
        entry_points={"other": "other_plugin"},
        modules={"other_plugin": source()},
    ):
        plugins = registry(TP_DISABLE_PLUGINS=blocked)
        assert "other" not in names(plugins.backends())
        assert [p.name for p in plugins.disabled()] == ["other"]
        assert "other_plugin" not in sys.modules
        with pytest.raises(PluginError, match="is blocked by TP_DISABLE_PLUGINS"):
            plugins.require("other")


@pytest.mark.parametrize("plugin", [Mine, Mine()], ids=["class", "instance"])
def test_a_script_registers_a_backend_by_itself(plugin):
    plugins = registry()
    plugins.register(plugin)
    assert "mine" in names(plugins.backends())
    plugins.unregister("mine")
    assert "mine" not in names(plugins.backends())


def test_a_script_registers_an_object_with_hooks():
    plugins = registry()
    command = Command("hello", "Say hello.", lambda: None)
    plugin = SimpleNamespace(tp_commands=hookimpl(specname="tp_commands")(lambda: [command]))
    plugins.register(plugin, name="hello-plugin")
    assert [c.item for c in plugins.commands() if c.plugin == "hello-plugin"] == [command]


def test_registering_a_name_twice_is_an_error():
    plugins = registry()
    plugins.register(Mine())
    with pytest.raises(DuplicateNameError, match="two plugins are called 'mine'"):
        plugins.register(Mine())


def test_registering_a_plugin_with_an_unknown_hook_is_an_error():
    @hookimpl
    def tp_bakends():
        return []

    plugin = SimpleNamespace(tp_bakends=tp_bakends)
    plugins = registry()
    with pytest.raises(ContractError, match="the hooks are tp_backends"):
        plugins.register(plugin, name="typo")
    assert "typo" not in [p.name for p in plugins.plugins()]


def test_removing_what_was_not_registered_is_an_error():
    with pytest.raises(PluginError, match="no plugin 'x' was registered by this process"):
        registry().unregister("x")


def test_refresh_finds_what_was_installed_since_and_keeps_what_was_registered(tmp_path):
    plugins = registry()
    plugins.register(Mine())
    assert "other" not in names(plugins.backends())
    with fake_distribution(
        tmp_path,
        "tp-other",
        entry_points={"other": "other_plugin"},
        modules={"other_plugin": source()},
    ):
        plugins.refresh()
        assert {"mine", "other"} <= set(names(plugins.backends()))


def test_a_third_partys_backend_runs_a_job(tmp_path):
    with fake_distribution(
        tmp_path,
        "tp-other",
        entry_points={"other": "other_plugin"},
        modules={"other_plugin": source()},
    ):
        (found,) = [c for c in registry().backends() if c.item.name == "other"]
        job = Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}))
        with found.item.open(job) as session:
            assert session.world_size == 1
