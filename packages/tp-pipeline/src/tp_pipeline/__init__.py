"""Pipeline parallelism: the stages of a model on several ranks, exact on uneven batches."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_pipeline._pipeline_options import PipelineOptions as PipelineOptions

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__, {"tp_pipeline._pipeline_options": ["PipelineOptions"]}
    )
