"""Layers whose parameters are split over ranks."""

from tp_shard.nn import functional, init
from tp_shard.nn._embedding import ParallelEmbedding
from tp_shard.nn._linear import ParallelLinear
from tp_shard.nn._loss import ParallelCrossEntropyLoss
from tp_shard.nn._register import RegisterParallelDim

__all__ = [
    "ParallelCrossEntropyLoss",
    "ParallelEmbedding",
    "ParallelLinear",
    "RegisterParallelDim",
    "functional",
    "init",
]
