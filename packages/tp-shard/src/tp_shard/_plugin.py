"""What tp-shard brings to the registry. Light: the heavy parts are imported in the hooks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend]":
    """Models that are split over processes, in one copy or several."""
    from tp_shard._backend import ShardBackend

    return [ShardBackend()]
