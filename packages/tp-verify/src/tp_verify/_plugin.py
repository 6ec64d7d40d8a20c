"""The hook of tp-verify for the registry; it imports the heavy modules when a command is run."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return ``tp verify``."""
    return [Command("verify", "Prove parallel training equal to one device.", _load)]


def _load() -> Any:
    from tp_verify._command import app

    return app
