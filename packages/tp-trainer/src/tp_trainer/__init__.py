"""One training script for one device, many devices or many machines."""

from tp_trainer._fit import Step
from tp_trainer._parallel_trainer import ParallelTrainer
from tp_trainer._progress import EpochRecord, History
from tp_trainer._trainer import Trainer

Parallel_Trainer = ParallelTrainer
"""The spelling of torchhandy, so that only the import line changes."""

__all__ = [
    "EpochRecord",
    "History",
    "ParallelTrainer",
    "Parallel_Trainer",
    "Step",
    "Trainer",
]
