"""Several plugins that bring one name: one of them, or none, has it, and nothing else is lost."""

import pytest
from tp_core.discovery import PluginRegistry
from tp_core.errors import DuplicateNameError
from tp_core.plugins import Command, hookimpl, registry
from tp_testing import fake_distribution

from tests.run_tp import doctor, run, seen

BACKEND = """
    from tp_core.plugins import Backend, Session, Verdict
    from tp_core.plugins import hookimpl

    tp_contract = 1

    class Named(Backend):
        def __init__(self, name):
            self.name = name
        def assess(self, job):
            return Verdict.fits(99, "it is {distribution}'s")
        def open(self, job):
            return Session(job)

    @hookimpl
    def tp_backends():
        return [Named(name) for name in {names}]
"""
COMMANDS = """
    import typer
    from tp_core.plugins import Command, hookimpl

    tp_contract = 1

    def load():
        app = typer.Typer()
        app.command()(lambda: None)
        return app

    @hookimpl
    def tp_commands():
        return [Command(name, "mine", load) for name in ("launch", "doctor", "unique")]
"""
ENGINE_AND_ADAPTER = """
    from tp_core.plugins import CollateAdapter, Engine, Verdict
    from tp_core.plugins import hookimpl

    tp_contract = 1

    class Threads(Engine):
        name = "thread"
        def assess(self, devices):
            return Verdict.fits(99, "mine")
        def open(self, worker, devices, *, options):
            raise NotImplementedError

    class Split(CollateAdapter):
        name = "tuple"
        def assess(self, sample, parts):
            return Verdict.fits(99, "mine")
        def adapt(self, collate_fn, *, parts, weights=None, cost=None):
            raise NotImplementedError

    @hookimpl
    def tp_engines():
        return [Threads]

    @hookimpl
    def tp_collate_adapters():
        return [Split]
"""


@pytest.fixture(autouse=True)
def looked_before():
    """The registry of the process has looked before a made-up distribution is there, and keeps none."""
    registry.plugins()


def installed(folder, distribution, source, *, plugin=None, **kwargs):
    module = distribution.replace("-", "_") + "_plugin"
    text = source.format(distribution=distribution, **kwargs) if kwargs else source
    points = {plugin or distribution: module}
    return fake_distribution(folder, distribution, version="1.2", entry_points=points, modules={module: text})


def owners(contributions):
    return {c.item.name: c.distribution for c in contributions}


@pytest.mark.parametrize("stranger", ["aaa", "zzz"])
def test_a_backend_of_this_project_keeps_its_name_whichever_comes_first(tmp_path, stranger):
    with installed(tmp_path, stranger, BACKEND, names=["single", "unique"]):
        plugins = PluginRegistry(environ={})
        found = owners(plugins.backends())
        (conflict,) = plugins.conflicts()
    assert found["single"] == "tp-trainer"
    assert found["unique"] == stranger
    assert f"the backend 'single' of plugin {stranger} 1.2 is left out" in str(conflict).replace(
        f"({stranger} 1.2)", "1.2"
    )
    assert "tp-trainer" in str(conflict)
    assert f"TP_DISABLE_PLUGINS={stranger}" in str(conflict)
    assert "TP_DISABLE_PLUGINS=tp-trainer" not in str(conflict)


def test_between_strangers_none_has_the_name_and_both_keep_their_other_ones(tmp_path):
    with (
        installed(tmp_path, "aaa", BACKEND, names=["same", "a"]),
        installed(tmp_path, "zzz", BACKEND, names=["same", "z"]),
    ):
        plugins = PluginRegistry(environ={})
        found = owners(plugins.backends())
        with pytest.raises(DuplicateNameError, match=r"2 backends are called 'same'.*aaa.* and .*zzz"):
            plugins.require("same")
        unambiguous = PluginRegistry(environ={"TP_DISABLE_PLUGINS": "zzz"})
        assert owners(unambiguous.backends())["same"] == "aaa"
    assert "same" not in found
    assert (found["a"], found["z"], found["single"]) == ("aaa", "zzz", "tp-trainer")


def test_the_remedy_of_a_conflict_is_one(tmp_path):
    with (
        installed(tmp_path, "aaa", BACKEND, names=["same"]),
        installed(tmp_path, "zzz", BACKEND, names=["same"], plugin="other"),
    ):
        (conflict,) = PluginRegistry(environ={}).conflicts()
        remedies = str(conflict).split("block its plugin with ")[1].split(" or ")
        assert len(remedies) == 2
        for remedy in remedies:
            name, value = remedy.split("=")
            assert "same" in owners(PluginRegistry(environ={name: value}).backends())


def test_an_engine_and_an_adapter_of_this_project_keep_their_names(tmp_path):
    with installed(tmp_path, "aaa", ENGINE_AND_ADAPTER):
        plugins = PluginRegistry(environ={})
        assert owners(plugins.engines())["thread"] == "tp-runner"
        assert owners(plugins.collate_adapters())["tuple"] == "tp-tuple"
        assert [(c.kind, c.name) for c in plugins.conflicts()] == [
            ("collate adapter", "tuple"),
            ("engine", "thread"),
        ]


def test_a_command_named_launch_leaves_all_commands_where_they_are(tmp_path, capsys):
    with seen(installed(tmp_path, "aaa", COMMANDS)) as plugins:
        assert owners(plugins.commands())["launch"] == "tp-launch"
        assert run(["--help"]) == 0
    captured = capsys.readouterr()
    assert all(name in captured.out for name in ("launch", "jobs", "logs", "stop", "run", "unique"))
    assert "the command 'launch' of plugin aaa" in captured.err
    assert "the command 'doctor' of plugin aaa" in captured.err


def test_a_plugin_with_the_name_of_one_of_this_project_does_not_replace_it(tmp_path):
    with installed(tmp_path, "aaa", BACKEND, names=["unique"], plugin="tp-trainer"):
        plugins = PluginRegistry(environ={})
        assert owners(plugins.backends())["single"] == "tp-trainer"
        (broken,) = plugins.broken()
        assert broken.info.distribution == "aaa"


def test_the_doctor_names_a_conflict_and_still_shows_the_backends(tmp_path, capsys):
    with seen(installed(tmp_path, "aaa", BACKEND, names=["single"])):
        report = doctor()
        assert run(["doctor", "--ranks", "0"]) == 1
    assert report["backend"] == "single"
    assert any("'single' of plugin aaa" in problem for problem in report["problems"])
    assert "Backends" in capsys.readouterr().out


def test_a_script_that_registers_a_taken_name_is_told_at_once_and_changes_nothing():
    plugins = PluginRegistry(environ={})

    class Plugin:
        @hookimpl
        def tp_commands(self):
            return [Command("launch", "mine", lambda: None), Command("hello", "mine", lambda: None)]

    with pytest.raises(DuplicateNameError, match=r"'launch' of plugin mine is left out: tp-launch"):
        plugins.register(Plugin(), name="mine")
    assert "hello" not in owners(plugins.commands())
    assert owners(plugins.commands())["launch"] == "tp-launch"
    assert not plugins.conflicts()
