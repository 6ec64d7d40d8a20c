"""Loggers: the destinations of a run's numbers.

``CsvLogger`` and ``JsonLinesLogger`` need nothing but this package; ``TensorBoardLogger``, ``WandbLogger``
and ``MlflowLogger`` need the extras ``tp-trainer[tensorboard]``, ``[wandb]`` and ``[mlflow]``. A custom
logger is a subclass of :class:`tp_core.plugins.Logger`; with a file or folder of its own it has a
:class:`LogPlace`.
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_core.plugins import Logger as Logger
    from tp_core.plugins import RunInfo as RunInfo

    from tp_trainer.loggers._csv import CsvLogger as CsvLogger
    from tp_trainer.loggers._files import LogPlace as LogPlace
    from tp_trainer.loggers._jsonl import JsonLinesLogger as JsonLinesLogger
    from tp_trainer.loggers._jsonl import LoggedRun as LoggedRun
    from tp_trainer.loggers._jsonl import read_run as read_run
    from tp_trainer.loggers._mlflow import MlflowLogger as MlflowLogger
    from tp_trainer.loggers._named import using_config as using_config
    from tp_trainer.loggers._tensorboard import TensorBoardLogger as TensorBoardLogger
    from tp_trainer.loggers._wandb import WandbLogger as WandbLogger
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.plugins": ["Logger", "RunInfo"],
            "tp_trainer.loggers._csv": ["CsvLogger"],
            "tp_trainer.loggers._files": ["LogPlace"],
            "tp_trainer.loggers._jsonl": ["JsonLinesLogger", "LoggedRun", "read_run"],
            "tp_trainer.loggers._mlflow": ["MlflowLogger"],
            "tp_trainer.loggers._named": ["using_config"],
            "tp_trainer.loggers._tensorboard": ["TensorBoardLogger"],
            "tp_trainer.loggers._wandb": ["WandbLogger"],
        },
        answers="tp_trainer._peer_names",
    )
