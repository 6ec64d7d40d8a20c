"""The hooks of tp-runner for the registry: its engines and the command ``tp run``."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


@hookimpl
def tp_engines() -> Iterable[Any]:
    """Return ``process``, ``thread`` and ``inline``."""
    from tp_runner._engines import ENGINES

    return ENGINES.values()


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return ``tp run``."""
    return [Command("run", "Run a batch of items through a runner, with resume.", _load_run)]


def _load_run() -> Any:
    from tp_runner._command._app import app

    return app
