"""Layers with parameters that are split over ranks."""

import tp_shard._guards  # noqa: F401 - registers the replacements in torch while there are groups
from tp_shard.nn import functional, init
from tp_shard.nn._blocks import ParallelAttention, ParallelSwiGLU
from tp_shard.nn._embedding import ParallelEmbedding
from tp_shard.nn._linear import ParallelLinear
from tp_shard.nn._loss import MarginCrossEntropy, ParallelCrossEntropyLoss
from tp_shard.nn._region import ParallelDropout, RegisterParallelDim

__all__ = [
    "MarginCrossEntropy",
    "ParallelAttention",
    "ParallelCrossEntropyLoss",
    "ParallelDropout",
    "ParallelEmbedding",
    "ParallelLinear",
    "ParallelSwiGLU",
    "RegisterParallelDim",
    "functional",
    "init",
]
