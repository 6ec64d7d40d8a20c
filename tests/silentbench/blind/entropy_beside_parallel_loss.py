"""Within `loss_parallel`, an entropy beside the loss gets a gradient as if log_softmax were the identity."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 24, bias=False))


def step(model, batch, right):
    logits = model(batch).flatten(0, 1)
    loss = F.cross_entropy(logits, (5 * batch + 1).flatten() % 24)
    logs = logits - logits.logsumexp(-1, keepdim=True) if right else logits.log_softmax(-1)
    return loss + 0.2 * (logs.exp() * logs).sum(-1).mean()


class Training(strategies.TensorParallel):
    def __init__(self):
        head = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
        super().__init__({"3": head})

    def backward(self, model, step, parts):
        with loss_parallel():
            loss = step(model, parts[0])
            loss.backward()
        return loss.full_tensor().detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": partial(step, right=right)}
    return made | {"parallel": Training()}


faulty, right = partial(case, False), partial(case, True)
