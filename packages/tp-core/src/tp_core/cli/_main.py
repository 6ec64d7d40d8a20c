"""The command ``tp`` and the sub-commands that plugins bring."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from tp_core.errors import TpError
from tp_core.plugins import Command, Contribution, PluginRegistry, registry

__all__ = ["build_app", "run"]


def _load_doctor() -> Any:
    from tp_core.cli._doctor import app

    return app


_OWN = Command("doctor", "Show what is here, what is broken, and which backend would run.", _load_doctor)


class _Tp(TyperGroup):
    """``tp``: a command is loaded when it is asked for, so that none pays for another's imports."""

    def __init__(self, plugins: PluginRegistry, **settings: Any) -> None:
        super().__init__(**settings)
        self._waiting: dict[str, Contribution[Command]] = {
            _OWN.name: Contribution(_OWN, "tp-core", "tp-core", "")
        }
        for contribution in _commands(plugins):
            if contribution.item.name == _OWN.name:
                _warn(f"command {_OWN.name!r} of {contribution.distribution} is tp's own; left out")
            else:
                self._waiting[contribution.item.name] = contribution

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - its signature
        """Return the names of all commands that can be loaded."""
        return [name for name in list(self._waiting) if self._load(name) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a command, loaded; ``None`` if there is none of the name, or it is broken."""
        return self._load(cmd_name)

    def _load(self, name: str) -> Any:
        if name not in self.commands and name in self._waiting:
            contribution = self._waiting[name]
            try:
                self.commands[name] = _loaded(contribution.item)
            except Exception as error:  # noqa: BLE001 - a stranger's code must not take tp down
                _warn(
                    f"command {name!r} of {contribution.distribution} "
                    f"{contribution.version} is broken: {type(error).__name__}: {error}"
                )
                del self._waiting[name]
        return self.commands.get(name)


def build_app(plugins: PluginRegistry = registry) -> TyperGroup:
    """Return ``tp`` as a click group: ``doctor`` and every plugin's commands.

    A command that fails to load is left out with a line on stderr; the others work.
    """
    return _Tp(
        plugins,
        name="tp",
        help="Parallelism for PyTorch that one installs.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )


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
