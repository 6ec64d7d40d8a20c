"""What this package brings to tp. Light: what is heavy is imported in the hooks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import CollateAdapter

tp_contract = 1


@hookimpl
def tp_collate_adapters() -> "Iterable[CollateAdapter]":
    """Bring the adapter."""
    from graphs_for_tp.adapter import GraphAdapter

    return [GraphAdapter()]
