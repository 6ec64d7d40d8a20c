"""The hook of tp-context for the registry; it imports the heavy modules when it is called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Return the backend that splits each sequence over ranks."""
    from tp_context._backend import ContextBackend

    return [ContextBackend()]
