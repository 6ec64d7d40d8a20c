"""The command ``tp`` and the sub-commands that plugins bring."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from tp_core.cli._doctor import doctor
from tp_core.errors import TpError
from tp_core.plugins import Command, Contribution, PluginRegistry, registry

__all__ = ["build_app", "run"]


def build_app(plugins: PluginRegistry = registry) -> Any:
    """Return ``tp`` as a click group: ``doctor`` and every plugin's commands.

    A command that fails to load is left out with a line on stderr; the others work.
    """
    app = typer.Typer(
        name="tp",
        help="Parallelism for PyTorch that one installs.",
        no_args_is_help=True,
        add_completion=False,
        cls=TyperGroup,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("doctor")(doctor)
    group: Any = typer.main.get_command(app)
    for contribution in _commands(plugins):
        command = contribution.item
        if command.name in group.commands:
            _warn(f"command {command.name!r} of {contribution.distribution} is tp's own; left out")
            continue
        try:
            group.add_command(_loaded(command), command.name)
        except Exception as error:  # noqa: BLE001 - a stranger's code must not take tp down
            _warn(
                f"command {command.name!r} of {contribution.distribution} "
                f"{contribution.version} is broken: {type(error).__name__}: {error}"
            )
    return group


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``tp`` and return its exit status; errors of tp's own print as one line."""
    try:
        build_app()(args=arguments, prog_name="tp")
    except TpError as error:
        _warn(str(error))
        return 1
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return 0 if end.code is None else 1
    return 0


def _root() -> None:
    """Parallelism for PyTorch that one installs."""


def _commands(plugins: PluginRegistry) -> tuple[Contribution[Command], ...]:
    try:
        return plugins.commands()
    except TpError as error:
        _warn(str(error))
        return ()


def _loaded(command: Command) -> Any:
    loaded = command.load()
    if isinstance(loaded, typer.Typer):
        loaded = typer.main.get_command(loaded)
    loaded.name = command.name
    loaded.help = loaded.help or command.help
    loaded.short_help = command.help
    return loaded


def _warn(text: str) -> None:
    print(f"tp: {text}", file=sys.stderr)
