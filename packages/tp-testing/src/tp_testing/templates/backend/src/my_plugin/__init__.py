"""A backend for tp: activations wait for the backward pass in the host's memory.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Bring the backend."""
    from my_plugin.backend import MyPluginBackend

    return [MyPluginBackend()]
