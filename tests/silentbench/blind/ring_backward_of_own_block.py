"""The backward pass of ring attention takes the keys and values of the first block for every block."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out, self.attend = nn.Linear(16, 48), nn.Linear(16, 16), F.scaled_dot_product_attention

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.out(self.attend(*self.qkv(x).chunk(3, dim=-1))))


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, right):
        blocks = [torch.empty(2, *k.shape, dtype=k.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(blocks, torch.stack([k, v]))
        sums = torch.cat([q @ k.mT / 4 for k, _ in blocks], -1).logsumexp(-1, keepdim=True)
        out = sum((q @ k.mT / 4 - sums).exp() @ v for k, v in blocks)
        ctx.save_for_backward(q, out, sums)
        ctx.blocks = blocks if right else [torch.stack([k, v])] * len(blocks)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (q, out, sums), dq, others = ctx.saved_tensors, 0, []
        for k, v in ctx.blocks:
            shares = (q @ k.mT / 4 - sums).exp()
            of_scores = shares * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True)) / 4
            dq = dq + of_scores @ k
            others.append(torch.stack([of_scores.mT @ q, shares.mT @ gradient]))
        dist.all_reduce(others := torch.stack(others))
        return dq, *others[dist.get_rank()], None


def step(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        model.attend = lambda q, k, v: Ring.apply(q, k, v, self.right)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + tokens.roll(1, dims=1)) % 24}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "vary": False}
    return made | {"parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
