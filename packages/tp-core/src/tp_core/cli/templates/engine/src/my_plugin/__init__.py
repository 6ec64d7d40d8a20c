"""An engine for tp-runner: threads of concurrent.futures.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

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
