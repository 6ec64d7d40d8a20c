from tp_trainer.callbacks._averaging import ExponentialMovingAverage as ExponentialMovingAverage
from tp_trainer.callbacks._early_stopping import EarlyStopping as EarlyStopping
from tp_trainer.callbacks._monitors import GradientNorm as GradientNorm
from tp_trainer.callbacks._monitors import LearningRateMonitor as LearningRateMonitor
from tp_trainer.callbacks._profiler import Profiler as Profiler
from tp_trainer.callbacks._throughput import Throughput as Throughput
from tp_trainer.callbacks._unfreezing import GradualUnfreezing as GradualUnfreezing
