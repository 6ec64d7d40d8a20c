"""Losses over classes that are split over ranks."""

from tp_shard.nn._loss._functional import parallel_cross_entropy, parallel_linear_cross_entropy
from tp_shard.nn._loss._margin_functional import parallel_margin_cross_entropy
from tp_shard.nn._loss._margin_module import MarginCrossEntropy
from tp_shard.nn._loss._module import ParallelCrossEntropyLoss
from tp_shard.nn._loss._sampling import sample_classes

__all__ = [
    "MarginCrossEntropy",
    "ParallelCrossEntropyLoss",
    "parallel_cross_entropy",
    "parallel_linear_cross_entropy",
    "parallel_margin_cross_entropy",
    "sample_classes",
]
