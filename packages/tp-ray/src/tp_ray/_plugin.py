"""The hook of tp-ray for the registry: its engine."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import hookimpl

tp_contract = 1


@hookimpl
def tp_engines() -> Iterable[Any]:
    """Return ``ray``."""
    from tp_ray._engine import RayEngine

    return [RayEngine()]
