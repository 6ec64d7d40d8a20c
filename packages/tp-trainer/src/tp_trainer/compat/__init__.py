"""The trainer with torchhandy's face, and its spelling. The names can be imported from `tp_trainer`, too."""

from tp_trainer.compat._parallel_trainer import Parallel_Trainer, ParallelTrainer

__all__ = ["ParallelTrainer", "Parallel_Trainer"]
