"""What my-plugin brings to tp. Light: what is heavy is imported in the hooks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Engine

tp_contract = 1


@hookimpl
def tp_engines() -> "Iterable[Engine]":
    """Bring the engine."""
    from my_plugin.engine import MyPluginEngine

    return [MyPluginEngine()]
