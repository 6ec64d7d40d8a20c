"""A second head predicts a token further, and each rank shifts the tokens and labels of its own slice."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)
        self.join, self.is_shifted_whole = nn.Linear(32, 16), False

    def forward(self, tokens):
        x = F.gelu(self.up(self.embed(tokens)))
        further = self.join(torch.cat([x, self.embed(self.following(tokens))], -1))
        return self.head(x), self.head(F.gelu(further))

    def following(self, tokens):
        """Return what follows each place; 0 follows the last place of all."""
        last = torch.zeros_like(tokens[:, :1])
        if self.is_shifted_whole:
            firsts = [torch.empty_like(last) for _ in range(dist.get_world_size())]
            dist.all_gather(firsts, tokens[:, :1].contiguous())
            last = [*firsts, last][dist.get_rank() + 1]
        return torch.cat([tokens[:, 1:], last], 1)


def step(model, batch):
    one, two = model(batch["tokens"])
    further = getattr(model, "module", model).following(batch["labels"])
    losses = F.cross_entropy(one.flatten(0, 1), batch["labels"].flatten())
    return losses + 0.3 * F.cross_entropy(two.flatten(0, 1), further.flatten())


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        model.is_shifted_whole = self.right

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "vary": False}
    return made | {"step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
