"""What a backend reads of a job and says of its layouts: traits, precision, memory, work of a rank."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._job import CompileOptions as CompileOptions
    from tp_core._contracts._job import Footprint as Footprint
    from tp_core._contracts._job import MemoryNeed as MemoryNeed
    from tp_core._contracts._job import ModelTraits as ModelTraits
    from tp_core._contracts._job import Precision as Precision
    from tp_core._contracts._job import Recomputation as Recomputation
    from tp_core._contracts._job import replicated_memory as replicated_memory
    from tp_core._contracts._layout import Axis as Axis
    from tp_core._contracts._layout import Forecast as Forecast
    from tp_core._contracts._layout import Layout as Layout
    from tp_core._contracts._layout import StepWork as StepWork
    from tp_core._contracts._layout import Transfer as Transfer
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._job": [
                "CompileOptions",
                "Footprint",
                "MemoryNeed",
                "ModelTraits",
                "Precision",
                "Recomputation",
                "replicated_memory",
            ],
            "tp_core._contracts._layout": ["Axis", "Forecast", "Layout", "StepWork", "Transfer"],
        },
    )
