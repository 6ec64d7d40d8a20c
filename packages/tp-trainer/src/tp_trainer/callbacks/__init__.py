"""Ready-made callbacks: what many runs need beside the training itself."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_trainer.callbacks._averaging import ExponentialMovingAverage
    from tp_trainer.callbacks._early_stopping import EarlyStopping
    from tp_trainer.callbacks._monitors import GradientNorm, LearningRateMonitor
    from tp_trainer.callbacks._profiler import Profiler
    from tp_trainer.callbacks._throughput import Throughput
    from tp_trainer.callbacks._unfreezing import GradualUnfreezing

__all__ = [
    "EarlyStopping",
    "ExponentialMovingAverage",
    "GradientNorm",
    "GradualUnfreezing",
    "LearningRateMonitor",
    "Profiler",
    "Throughput",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_averaging": ["ExponentialMovingAverage"],
            "_early_stopping": ["EarlyStopping"],
            "_monitors": ["GradientNorm", "LearningRateMonitor"],
            "_profiler": ["Profiler"],
            "_throughput": ["Throughput"],
            "_unfreezing": ["GradualUnfreezing"],
        },
    )
