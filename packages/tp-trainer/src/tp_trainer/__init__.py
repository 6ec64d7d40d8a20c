"""One training script for one device, many devices or many machines."""

from typing import TYPE_CHECKING

from tp_core import lazy_exports

if TYPE_CHECKING:
    from tp_trainer._fit import Step
    from tp_trainer._parallel_trainer import Parallel_Trainer, ParallelTrainer
    from tp_trainer._progress import EpochRecord, History
    from tp_trainer._trainer import Trainer

__all__ = [
    "EpochRecord",
    "History",
    "ParallelTrainer",
    "Parallel_Trainer",
    "Step",
    "Trainer",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_fit": ["Step"],
            "_parallel_trainer": ["Parallel_Trainer", "ParallelTrainer"],
            "_progress": ["EpochRecord", "History"],
            "_trainer": ["Trainer"],
        },
    )
