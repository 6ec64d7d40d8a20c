"""The conformance tests of sub-commands of ``tp``, for their authors to subclass."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
from tp_core.discovery import OWN_COMMANDS, PluginRegistry
from tp_core.plugins import Command, hookimpl

from tp_testing._kit import DeclaredLimits

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_WIDEST_HELP = 100


class _CommandResult(NamedTuple):
    status: int
    out: str
    err: str


class CommandConformance(DeclaredLimits):
    """The tests of every sub-command of ``tp``. A subclass, in a test module, names the command.

    The tests run it as ``tp`` does, and check the streams and the exit status that a shell sees.

    Attributes:
        command: The command under test.
        arguments: Arguments with which it succeeds and changes nothing.

    Example:
        >>> class TestMine(CommandConformance):
        ...     command = MY_COMMAND
        ...     arguments = ("--json",)
    """

    command: ClassVar[Command]
    arguments: ClassVar[Sequence[str]] = ()

    @pytest.fixture(autouse=True)
    def _captured(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        monkeypatch.setenv("TERM", "dumb")  # plain text
        monkeypatch.setenv("COLUMNS", "200")

    def subject(self) -> str:
        """Return the name of the command."""
        return self.command.name

    # -- the tests ------------------------------------------------------------------------------

    def test_its_name_is_one_that_people_can_type(self) -> None:
        name = self.command.name
        assert _NAME.fullmatch(name), f"lower-case letters and digits, words joined by '-', got {name!r}"
        assert name not in OWN_COMMANDS, f"`tp` has a command {name!r} of its own"

    def test_its_line_for_the_list_of_commands_is_one_line(self) -> None:
        line = self.command.help
        assert line.strip() == line
        assert line
        assert "\n" not in line
        assert len(line) <= _WIDEST_HELP, f"{len(line)} characters; the rest belongs into its own help"

    def test_it_loads_again_and_again(self) -> None:
        import typer

        for _ in range(2):
            loaded = self.command.load()
            # By its attributes: typer has its own copy of click, so a class check would miss commands of one.
            is_command = isinstance(loaded, typer.Typer) or hasattr(loaded, "make_context")
            assert is_command, f"load() returns a typer.Typer or a click.Command, got {loaded!r}"

    def test_loading_it_prints_nothing(self) -> None:
        self.command.load()
        captured = self._capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")

    def test_tp_lists_it(self) -> None:
        ended = self._tp("--help")
        assert ended.status == 0, ended.err
        assert self.command.name in ended.out
        assert self.command.help in " ".join(ended.out.split())

    def test_it_explains_itself(self) -> None:
        ended = self._tp(self.command.name, "--help")
        assert ended.status == 0, ended.err
        assert "Usage: tp " + self.command.name in " ".join(ended.out.split())

    def test_it_ends_well(self) -> None:
        ended = self._tp(self.command.name, *self.arguments)
        assert ended.status == 0, ended.err

    def test_an_unknown_option_is_refused_by_name(self) -> None:
        ended = self._tp(self.command.name, *self.arguments, "--no-such-option")
        assert ended.status == 2, "2 is the exit status of a command that was called in a wrong way"
        assert "--no-such-option" in ended.err
        assert not ended.out, "it began before it had looked at its arguments"
        assert "Traceback" not in ended.err

    def _tp(self, *arguments: str) -> _CommandResult:
        from tp_core.cli import build_app

        implementation = hookimpl(specname="tp_commands")(lambda: [self.command])
        plugins = PluginRegistry(environ={})
        # Where its distribution is installed, it is there already.
        if self.command.name not in {contribution.item.name for contribution in plugins.commands()}:
            plugins.register(SimpleNamespace(tp_commands=implementation), name="under-test")
        app: Any = build_app(plugins)
        self._capsys.readouterr()
        status: Any = 0
        try:
            app(args=list(arguments), prog_name="tp")
        except SystemExit as end:
            status = end.code
        captured = self._capsys.readouterr()
        if status is None:
            status = 0
        return _CommandResult(status, captured.out, captured.err)
