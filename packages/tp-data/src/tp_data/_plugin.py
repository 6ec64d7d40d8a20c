"""The hook of tp-data for the registry; it imports the heavy modules when it is called."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return ``tp data``, which looks at data and its order."""
    return [Command("data", "Index data, look at its samples, find what a step has.", _load_command)]


def _load_command() -> Any:
    from tp_data._commands import app

    return app
