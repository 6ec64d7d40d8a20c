"""Hooks of tp-tuple for the registry; they import the heavy modules when they are called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend, CollateAdapter

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Return the backend for several devices in one process."""
    from tp_tuple._backend import TupleBackend

    return [TupleBackend()]


@hookimpl
def tp_collate_adapters() -> "Iterable[CollateAdapter]":
    """Return the adapter for lists of items of any type."""
    from tp_tuple._collate import TupleCollateAdapter

    return [TupleCollateAdapter()]
