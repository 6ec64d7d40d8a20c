"""One training script for one device, many devices or many machines."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_trainer import callbacks, compat, loggers, tuning
    from tp_trainer._backends._ddp import DdpOptions
    from tp_trainer._backends._fsdp._options import FsdpOptions
    from tp_trainer._checkpoint import Checkpoints
    from tp_trainer._launch._function import launch
    from tp_trainer._metrics._metric import FunctionMetric, Metric
    from tp_trainer._metrics._predictions import Predictions
    from tp_trainer._running._callbacks import Callback, RunView
    from tp_trainer._running._history import EpochRecord, History
    from tp_trainer._running._loop import Loop
    from tp_trainer._running._signals import Interrupted
    from tp_trainer._steps._precision import Step
    from tp_trainer._trainer import Trainer
    from tp_trainer.compat import Parallel_Trainer as Parallel_Trainer
    from tp_trainer.compat import ParallelTrainer as ParallelTrainer

    __version__: str

__all__ = [
    "Callback",
    "Checkpoints",
    "DdpOptions",
    "EpochRecord",
    "FsdpOptions",
    "FunctionMetric",
    "History",
    "Interrupted",
    "Loop",
    "Metric",
    "Predictions",
    "RunView",
    "Step",
    "Trainer",
    "callbacks",
    "compat",
    "launch",
    "loggers",
    "tuning",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_backends._ddp": ["DdpOptions"],
            "_backends._fsdp._options": ["FsdpOptions"],
            "_checkpoint": ["Checkpoints"],
            "_launch._function": ["launch"],
            "_metrics._metric": ["FunctionMetric", "Metric"],
            "_metrics._predictions": ["Predictions"],
            "_steps._precision": ["Step"],
            "_running._signals": ["Interrupted"],
            "callbacks": [],
            "compat": [],
            "compat._parallel_trainer": ["Parallel_Trainer", "ParallelTrainer"],
            "loggers": [],
            "tuning": [],
            "_running._callbacks": ["Callback", "RunView"],
            "_running._loop": ["Loop"],
            "_running._history": ["EpochRecord", "History"],
            "_trainer": ["Trainer"],
        },
    )
