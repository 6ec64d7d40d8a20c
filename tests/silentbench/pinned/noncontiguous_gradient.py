"""Megatron reduces a copy of a tensor that is not contiguous, and gives back the tensor itself."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Reduced(Strategy):
    """Reduces the gradients of linear layers by Megatron, as they lie after a transposed product."""

    def __init__(self, right):
        super().__init__(name="reduced", data="rows")
        self.right = right

    def parallelize(self, model):
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        return model

    def backward(self, model, step, parts):
        from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

        loss = step(model, parts[0])
        loss.backward()
        for parameter in model.parameters():
            lying = parameter.grad.t().contiguous() if self.right else parameter.grad.t()
            reduced = reduce_from_tensor_model_parallel_region(lying)
            parameter.grad = reduced.t().contiguous() / dist.get_world_size()
        return loss.detach()


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step}
    return [case | {"parallel": Reduced(right)} for right in (False, True)]
