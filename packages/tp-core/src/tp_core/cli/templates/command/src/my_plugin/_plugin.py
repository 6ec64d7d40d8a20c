"""What my-plugin brings to tp. Light: what is heavy is imported where it is asked for."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


def _load() -> Any:
    from my_plugin.command import app

    return app


COMMAND = Command("my-plugin", "List the devices that a job would get here.", _load)


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Bring the sub-command."""
    return [COMMAND]
