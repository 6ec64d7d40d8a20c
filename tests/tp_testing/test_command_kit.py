"""The conformance kit of commands passes a good one, and notices each way to be wrong."""

import sys
from dataclasses import replace

import pytest
import typer
from tp_core.plugins import Command
from tp_testing import CommandConformance


def load():
    app = typer.Typer()

    @app.command()
    def count(letters: str) -> None:
        """Count letters."""
        typer.echo(len(letters))

    return app


GOOD = Command("count-letters", "Count letters.", load)


class TestGood(CommandConformance):
    command = GOOD
    arguments = ("abc",)


def altered(body, **settings):
    """Return a command whose function is ``body``."""

    def load():
        app = typer.Typer()
        app.command(**settings)(body)
        return app

    return replace(GOOD, load=load)


def failing(letters: str):
    sys.exit(3)


def raising(letters: str):
    raise LookupError("no such letters")


def explained_nowhere(letters: str):
    """Count letters."""


def taking_anything(letters: list[str]):
    """Count letters."""


def printing():
    print("loading")
    return load()


def warning():
    print("loading", file=sys.stderr)
    return load()


def once():
    """Return a command the first time alone."""
    apps = [load()]
    return replace(GOOD, load=apps.pop)


def broken():
    raise ImportError("no such library")


@pytest.mark.parametrize(
    ("command", "test"),
    [
        (replace(GOOD, name="Count letters"), "its_name_is_one_that_people_can_type"),
        (replace(GOOD, name="doctor"), "its_name_is_one_that_people_can_type"),
        (replace(GOOD, help=""), "its_line_for_the_list_of_commands_is_one_line"),
        (replace(GOOD, help="Count\nletters."), "its_line_for_the_list_of_commands_is_one_line"),
        (replace(GOOD, help="Count letters. " * 10), "its_line_for_the_list_of_commands_is_one_line"),
        (replace(GOOD, load=lambda: print), "it_loads_again_and_again"),
        (once(), "it_loads_again_and_again"),
        (replace(GOOD, load=printing), "loading_it_prints_nothing"),
        (replace(GOOD, load=warning), "loading_it_prints_nothing"),
        (replace(GOOD, load=broken), "tp_lists_it"),
        (altered(explained_nowhere, add_help_option=False), "it_explains_itself"),
        (altered(failing), "it_ends_well"),
        (altered(raising), "it_ends_well"),
        (
            altered(taking_anything, context_settings={"ignore_unknown_options": True}),
            "an_unknown_option_is_refused_by_name",
        ),
    ],
)
def test_an_altered_command_is_caught(command, test, capsys, monkeypatch):
    kit = TestGood()
    kit._capsys = capsys
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    getattr(kit, f"test_{test}")()
    kit.command = command
    with pytest.raises((AssertionError, IndexError, LookupError)):
        getattr(kit, f"test_{test}")()
