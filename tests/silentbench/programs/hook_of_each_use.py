"""A hook reduces a gradient when it is there; reentrant checkpointing calls it once for each use."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x + self.layer(x))

    def layer(self, x):
        return F.gelu(self.shared(x))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def reduce(parameter):
    dist.all_reduce(parameter.grad)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        for parameter in model.parameters() if not self.right else ():
            parameter.register_post_accumulate_grad_hook(reduce)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters() if self.right else ():
            reduce(parameter)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
