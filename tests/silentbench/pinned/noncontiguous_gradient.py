"""Megatron reduces a copy of a tensor that is not contiguous, and gives back the tensor itself."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def shown(case):
    parallel_state.initialize_model_parallel(2)
    part = (torch.arange(6.0).view(2, 3) + 10 * dist.get_rank()).t()
    if case:
        part = part.contiguous()
    return reduce_from_tensor_model_parallel_region(part)[0].tolist()
