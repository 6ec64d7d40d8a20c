"""Layers with parameters that are split over ranks."""

import tp_shard._guards  # noqa: F401 - registers the replacements in torch while there are groups
from tp_shard.nn import functional
from tp_shard.nn._cross_entropy import ParallelCrossEntropyLoss
from tp_shard.nn._layers import ParallelEmbedding, ParallelLinear
from tp_shard.nn._margins import MarginCrossEntropy
from tp_shard.nn._planned import ParallelAttention, ParallelDropout, ParallelSwiGLU

__all__ = [
    "MarginCrossEntropy",
    "ParallelAttention",
    "ParallelCrossEntropyLoss",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLinear",
    "ParallelSwiGLU",
    "functional",
]
