"""What this package brings to tp. Light: what is heavy is imported in the hooks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Bring the backend."""
    from accelerate_for_tp.backend import AccelerateBackend

    return [AccelerateBackend()]
