"""Losses over classes that are split over ranks."""

from tp_shard.nn._loss._functional import (
    ParallelCrossEntropyLoss,
    parallel_cross_entropy,
    parallel_linear_cross_entropy,
)
from tp_shard.nn._loss._margins import MarginCrossEntropy, parallel_margin_cross_entropy, sample_classes

__all__ = [
    "MarginCrossEntropy",
    "ParallelCrossEntropyLoss",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "parallel_margin_cross_entropy",
    "sample_classes",
]
