"""Ready-made callbacks for common tasks beside training."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_trainer.callbacks._averaging import ExponentialMovingAverage as ExponentialMovingAverage
    from tp_trainer.callbacks._averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from tp_trainer.callbacks._early_stopping import EarlyStopping as EarlyStopping
    from tp_trainer.callbacks._monitors import GradientNorm as GradientNorm
    from tp_trainer.callbacks._monitors import LearningRateMonitor as LearningRateMonitor
    from tp_trainer.callbacks._monitors import Throughput as Throughput
    from tp_trainer.callbacks._profiler import Profiler as Profiler
    from tp_trainer.callbacks._unfreezing import GradualUnfreezing as GradualUnfreezing
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_trainer.callbacks._averaging": ["ExponentialMovingAverage", "StochasticWeightAveraging"],
            "tp_trainer.callbacks._early_stopping": ["EarlyStopping"],
            "tp_trainer.callbacks._monitors": ["GradientNorm", "LearningRateMonitor", "Throughput"],
            "tp_trainer.callbacks._profiler": ["Profiler"],
            "tp_trainer.callbacks._unfreezing": ["GradualUnfreezing"],
        },
        answers="tp_trainer._peer_names",
    )
