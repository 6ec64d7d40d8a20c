"""Plugins that bring or answer nonsense, and distributions that are damaged, cost themselves alone."""

from textwrap import dedent

import pytest
from tp_core.discovery import PluginRegistry

from tests.run_tp import doctor, run, seen
from tests.tp_core.plugins.odd import odd, source


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("return Verdict('high', 'it is')", "a score must be a finite number, got 'high'"),
        ("return Verdict(float('nan'), 'it is')", "a score must be a finite number, got nan"),
        ("return Verdict.fits('9', 'it is')", "a score must be a finite number, got '9'"),
        (
            "return Verdict.fits(9, 7)",
            "a verdict needs a reason: one sentence for the user, got 7",
        ),
        ("return Verdict.unfit('no', remedy=3)", "the remedy of a verdict must be a string, got 3"),
        ("return 3", "it must return a Verdict, got int"),
        (
            "pass\n    def estimate_memory(self, job): return 'much'",
            "it must return a MemoryNeed or None, got str",
        ),
        ("pass\n    def estimate_memory(self, job): 1 / 0", "estimate_memory() raised ZeroDivisionError"),
    ],
)
def test_a_backend_that_answers_nonsense_does_not_end_the_selection(asked, words, tmp_path):
    text = source(asked="@@")
    if "def estimate" in asked:
        extra = asked.partition("\n")[2]
        text = text.replace("    def open(", f"{extra}\n    def open(").replace("@@", "pass")
    with seen(odd(tmp_path, text.replace("@@", asked))):
        report = doctor()
    assert report["backend"] == "single"
    (problem,) = report["problems"]
    assert words in problem


COMMAND = """
    from tp_core.plugins import Command, hookimpl

    tp_contract = 1

    def load():
        import typer

        app = typer.Typer()

        @app.command()
        def go():
            print("gone")

        return app

    @hookimpl
    def tp_commands():
        return [{command}]
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "Command('--help', 'mine', load)",
            "the command '--help' of plugin odd (acme-odd 0.1) needs one word",
        ),
        ("Command('two words', 'mine', load)", "the command 'two words'"),
        ("Command('greet', 3, load)", "Command 'greet' of plugin odd (acme-odd 0.1) needs a help that is a"),
        ("Command('greet', 'mine', 3)", "the load of command 'greet' of plugin odd (acme-odd 0.1) must be a"),
    ],
)
def test_a_command_that_could_not_be_called_or_shown_is_left_out(command, words, tmp_path):
    with odd(tmp_path, COMMAND.format(command=command)):
        plugins = PluginRegistry(environ={})
        (broken,) = plugins.broken()
        assert words in str(broken)
        assert "launch" in [c.item.name for c in plugins.commands()]


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--ranks", "0"]])
def test_brackets_in_what_a_plugin_calls_itself_are_shown_as_they_are(arguments, tmp_path, capsys):
    text = dedent(COMMAND).format(command="Command('greet', '[/red] hi', load)") + source().replace(
        '"odd"', '"[/red] odd"'
    )
    with seen(odd(tmp_path, text, name="[/red] odd")):
        assert run(arguments) == 0
    assert "[/red]" in capsys.readouterr().out


def test_an_entry_point_that_names_no_module_is_said_to(tmp_path):
    with odd(tmp_path, "", point="not a::module"):
        (broken,) = PluginRegistry(environ={}).broken()
    assert "its entry point must be 'module' or 'module:attribute', got 'not a::module'" in str(broken)


def test_a_distribution_whose_files_are_damaged_costs_itself_alone(tmp_path, monkeypatch):
    folder = tmp_path / "damaged-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_bytes(b"\xff\xfe[tp.plugins]\nodd = odd_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = PluginRegistry(environ={})
    (broken,) = whole.broken()
    assert "plugin damaged is broken: UnicodeDecodeError" in str(broken)
    monkeypatch.undo()
    assert {p.name for p in PluginRegistry(environ={}).plugins()} == {p.name for p in whole.plugins()}


def test_a_plugin_whose_dependency_is_missing_is_named_with_it(tmp_path):
    with seen(odd(tmp_path, "import no_such_module_anywhere")):
        (problem,) = doctor()["problems"]
    assert "install what brings the module 'no_such_module_anywhere', or block it with" in problem
