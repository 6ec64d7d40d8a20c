"""Loggers: what the numbers of a run are written to.

``CsvLogger`` and ``JsonLinesLogger`` need nothing but this package; ``TensorBoardLogger``, ``WandbLogger``
and ``MlflowLogger`` need the extras ``tp-trainer[tensorboard]``, ``[wandb]`` and ``[mlflow]``. A logger of
one's own is a subclass of :class:`tp_core.plugins.Logger`.
"""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_core.plugins import Logger, RunInfo

    from tp_trainer.loggers._csv import CsvLogger
    from tp_trainer.loggers._jsonl import JsonLinesLogger
    from tp_trainer.loggers._mlflow import MlflowLogger
    from tp_trainer.loggers._reading import LoggedRun, read_run
    from tp_trainer.loggers._tensorboard import TensorBoardLogger
    from tp_trainer.loggers._wandb import WandbLogger

__all__ = [
    "CsvLogger",
    "JsonLinesLogger",
    "LoggedRun",
    "Logger",
    "MlflowLogger",
    "RunInfo",
    "TensorBoardLogger",
    "WandbLogger",
    "read_run",
]

if not TYPE_CHECKING:
    from tp_core.plugins import Logger, RunInfo

    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_csv": ["CsvLogger"],
            "_jsonl": ["JsonLinesLogger"],
            "_mlflow": ["MlflowLogger"],
            "_reading": ["LoggedRun", "read_run"],
            "_tensorboard": ["TensorBoardLogger"],
            "_wandb": ["WandbLogger"],
        },
    )
