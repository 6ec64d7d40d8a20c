"""The hook of tp-testing for the registry: the command ``tp new-plugin``."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return ``tp new-plugin``."""
    return [Command("new-plugin", "Write a package with a plugin, to begin from.", _load)]


def _load() -> Any:
    from tp_testing._new_plugin import app

    return app
