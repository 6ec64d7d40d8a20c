"""The plugins of tp-shard for the registry. Light: the hooks import the heavy parts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import Command, hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    from tp_shard._backend import ShardBackend

    return [ShardBackend()]


@hookimpl
def tp_commands() -> Iterable[Command]:
    return [Command("shard", "Verify plans that split models over ranks.", _load_command)]


def _load_command() -> Any:
    from tp_shard._command import app

    return app
