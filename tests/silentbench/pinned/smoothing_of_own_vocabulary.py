"""Megatron smooths labels over each rank's words: ranks have other losses than one device."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def shown(case):
    ranks = 1 if case else 2
    parallel_state.initialize_model_parallel(ranks)
    scores = torch.arange(8.0).view(1, 1, 8).chunk(ranks, dim=-1)
    own = scores[0 if case else dist.get_rank()].contiguous()
    loss = vocab_parallel_cross_entropy(own, torch.tensor([[5]]), label_smoothing=0.1)
    return round(float(loss), 4)
