"""A sub-command of tp: the devices that a job would get here.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

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
