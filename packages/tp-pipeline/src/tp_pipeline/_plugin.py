"""The hook of tp-pipeline for the registry; it imports the heavy modules when it is called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Return the backend that gives each rank some stages of the model."""
    from tp_pipeline._pipeline_backend import PipelineBackend

    return [PipelineBackend()]
