"""A collate adapter for tp: parts of a batch with nearly equal lengths.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import CollateAdapter

tp_contract = 1


@hookimpl
def tp_collate_adapters() -> "Iterable[CollateAdapter]":
    """Bring the adapter."""
    from my_plugin.adapter import MyPluginAdapter

    return [MyPluginAdapter()]
