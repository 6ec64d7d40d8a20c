"""What a backend reads of a job, and says of its layouts: traits, precision, memory."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._job import BUCKET_NBYTES as BUCKET_NBYTES
    from tp_core._contracts._job import Axis as Axis
    from tp_core._contracts._job import CompileOptions as CompileOptions
    from tp_core._contracts._job import Footprint as Footprint
    from tp_core._contracts._job import Layout as Layout
    from tp_core._contracts._job import MemoryNeed as MemoryNeed
    from tp_core._contracts._job import ModelTraits as ModelTraits
    from tp_core._contracts._job import Precision as Precision
    from tp_core._contracts._job import Recomputation as Recomputation
    from tp_core._contracts._job import divisors as divisors
    from tp_core._contracts._job import whole_model_arguments as whole_model_arguments
    from tp_core._contracts._replicated_memory import replicated_memory as replicated_memory
    from tp_core._contracts._segments import CachingAllocator as CachingAllocator
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._job": [
                "BUCKET_NBYTES",
                "Axis",
                "CompileOptions",
                "Footprint",
                "Layout",
                "MemoryNeed",
                "ModelTraits",
                "Precision",
                "Recomputation",
                "divisors",
                "whole_model_arguments",
            ],
            "tp_core._contracts._replicated_memory": ["replicated_memory"],
            "tp_core._contracts._segments": ["CachingAllocator"],
        },
    )
