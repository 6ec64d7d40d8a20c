"""Megatron smooths labels over each rank's words: ranks have other losses than one device."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 24, bias=False))


def step(model, batch):
    return smoothed(model(batch), (5 * batch + 1) % 24)


def smoothed(scores, labels):
    """Return the loss that the words beside the label share 0.1 in: Megatron's own definition."""
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1 * 24 / 23)


class SplitVocabulary(Strategy):
    data = "whole"

    def __init__(self, gathers):
        super().__init__()
        self.gathers = gathers

    def parallelize(self, model):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        own = model[3].weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
        model[3].weight = nn.Parameter(own.clone())
        model[3].register_forward_pre_hook(lambda _, inputs: copy_to_tensor_model_parallel_region(*inputs))

    def backward(self, model, step, parts):
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

        scores, labels = model(parts[0]), (5 * parts[0] + 1) % 24
        if self.gathers:
            before, own = dist.get_rank() * scores.size(-1), scores.size(-1)
            padded = F.pad(scores, (before, 24 - before - own))
            loss = smoothed(reduce_from_tensor_model_parallel_region(padded), labels)
        else:
            loss = vocab_parallel_cross_entropy(scores, labels, label_smoothing=0.1).mean()
        loss.backward()
        return loss.detach()

    def evaluate(self, model, step, share):
        return None


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step}
    return [case | {"parallel": SplitVocabulary(gathers)} for gathers in (False, True)]
