"""The hooks: what a plugin may bring."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tp_core._contracts._backend import Backend
from tp_core._contracts._callback import NamedCallback
from tp_core._contracts._collate import CollateAdapter
from tp_core._contracts._engine import Engine
from tp_core._contracts._logger import LoggerFactory
from tp_core.plugins._markers import hookspec

__all__ = ["OWN_COMMANDS", "Command", "HookSpecs"]

OWN_COMMANDS = frozenset({"doctor", "new-plugin"})
"""Sub-commands that `tp` has without any plugin; no plugin's command can have their names."""


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command of ``tp``.

    Attributes:
        name: The word after ``tp``.
        help: One line for ``tp --help``.
        load: Returns the command as a ``typer.Typer`` or a ``click.Command``; what is heavy is
            imported in here.
    """

    name: str
    help: str
    load: Callable[[], Any]


class HookSpecs:
    """Every hook, all optional. A plugin module implements the ones it needs.

    Example:
        >>> from tp_core.plugins import hookimpl
        >>> @hookimpl
        ... def tp_backends():
        ...     from my_package.backend import MyBackend
        ...     return [MyBackend()]
    """

    @hookspec
    def tp_backends(self) -> Iterable[Backend[Any]]:  # type: ignore[empty-body]  # a declaration
        """Return the backends that this plugin brings."""

    @hookspec
    def tp_collate_adapters(self) -> Iterable[CollateAdapter]:  # type: ignore[empty-body]  # as above
        """Return the collate adapters that this plugin brings."""

    @hookspec
    def tp_engines(self) -> Iterable[Engine]:  # type: ignore[empty-body]  # as above
        """Return the engines that this plugin brings."""

    @hookspec
    def tp_commands(self) -> Iterable[Command]:  # type: ignore[empty-body]  # as above
        """Return the sub-commands of ``tp`` that this plugin brings."""

    @hookspec
    def tp_callbacks(self) -> Iterable[NamedCallback]:  # type: ignore[empty-body]  # as above
        """Return the callbacks that this plugin brings, for runs that name them or for all."""

    @hookspec
    def tp_loggers(self) -> Iterable[LoggerFactory]:  # type: ignore[empty-body]  # as above
        """Return what makes the loggers that this plugin brings."""
