"""The hook of tp-dp-gather for the registry; it imports the heavy modules when it is called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Return the backend for several devices in one process, with the whole output on one of them."""
    from tp_dp_gather._backend import GatherBackend

    return [GatherBackend()]
