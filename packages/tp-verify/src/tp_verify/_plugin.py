"""The hook of tp-verify for the registry; it imports the heavy modules when a command is run."""

import os
from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Callback, Command, NamedCallback, hookimpl

tp_contract = 1


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return ``tp verify``."""
    return [Command("verify", "Prove parallel training equal to one device.", _load)]


@hookimpl
def tp_callbacks() -> Iterable[NamedCallback]:
    """Return what records a run of a script that ``tp verify`` has started; without it, nothing."""
    if "TP_VERIFY" not in os.environ:
        return []
    return [NamedCallback("verify", "Records a run for tp verify.", _recorder, joins=True)]


def _recorder() -> Callback:
    from tp_verify._script_recorder import ScriptRecorder

    return ScriptRecorder()


def _load() -> Any:
    from tp_verify._command import app

    return app
