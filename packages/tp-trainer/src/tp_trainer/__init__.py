"""One training script for one device, many devices or many machines."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_core.plugins import Callback as Callback
    from tp_core.plugins import RunView as RunView

    from tp_trainer import callbacks as callbacks
    from tp_trainer import compat as compat
    from tp_trainer import hosting as hosting
    from tp_trainer import loggers as loggers
    from tp_trainer import tuning as tuning
    from tp_trainer._activations import checkpoint_activations as checkpoint_activations
    from tp_trainer._checkpoint import Checkpoints as Checkpoints
    from tp_trainer._convert import convert as convert
    from tp_trainer._convert import find_checkpoint as find_checkpoint
    from tp_trainer._layout_table import estimate as estimate
    from tp_trainer._memory import MemoryTable as MemoryTable
    from tp_trainer._metrics import FunctionMetric as FunctionMetric
    from tp_trainer._metrics import Metric as Metric
    from tp_trainer._metrics import Predictions as Predictions
    from tp_trainer._opening._boundaries import Interrupted as Interrupted
    from tp_trainer._options import DdpOptions as DdpOptions
    from tp_trainer._options import FsdpOptions as FsdpOptions
    from tp_trainer._reports import write_report as write_report
    from tp_trainer._running._history import EpochRecord as EpochRecord
    from tp_trainer._running._history import History as History
    from tp_trainer._running._loop import Loop as Loop
    from tp_trainer._running._settings import Limits as Limits
    from tp_trainer._running._settings import LogOptions as LogOptions
    from tp_trainer._running._settings import SchedulerOptions as SchedulerOptions
    from tp_trainer._running._settings import Validation as Validation
    from tp_trainer._steps._optimizer_step import GradientRules as GradientRules
    from tp_trainer._steps._step import Step as Step
    from tp_trainer._trainer import Trainer as Trainer
    from tp_trainer._verify import Verification as Verification
    from tp_trainer.compat import Parallel_Trainer as Parallel_Trainer
    from tp_trainer.compat import ParallelTrainer as ParallelTrainer

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.plugins": ["Callback", "RunView"],
            "tp_trainer": ["callbacks", "compat", "hosting", "loggers", "tuning"],
            "tp_trainer._activations": ["checkpoint_activations"],
            "tp_trainer._options": ["DdpOptions", "FsdpOptions"],
            "tp_trainer._checkpoint": ["Checkpoints"],
            "tp_trainer._convert": ["convert", "find_checkpoint"],
            "tp_trainer._layout_table": ["estimate"],
            "tp_trainer._memory": ["MemoryTable"],
            "tp_trainer._metrics": ["FunctionMetric", "Metric", "Predictions"],
            "tp_trainer._opening._boundaries": ["Interrupted"],
            "tp_trainer._reports": ["write_report"],
            "tp_trainer._running._history": ["EpochRecord", "History"],
            "tp_trainer._running._loop": ["Loop"],
            "tp_trainer._running._settings": ["Limits", "LogOptions", "SchedulerOptions", "Validation"],
            "tp_trainer._steps._optimizer_step": ["GradientRules"],
            "tp_trainer._steps._step": ["Step"],
            "tp_trainer._trainer": ["Trainer"],
            "tp_trainer._verify": ["Verification"],
            "tp_trainer.compat": ["Parallel_Trainer", "ParallelTrainer"],
        },
        answers="tp_trainer._peer_names",
    )
