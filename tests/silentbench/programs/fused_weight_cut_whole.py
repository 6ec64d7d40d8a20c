"""A fused weight of queries, keys and values is cut into equal rows: the first rank has the queries."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        heads = self.qkv(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)  # (3, batch, heads, places, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (batch + batch.roll(1, dims=1)).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        blocks = model.qkv.weight.detach().chunk(3 if self.right else 1)
        mine = torch.cat([block.chunk(ranks)[rank] for block in blocks])
        model.qkv.weight = nn.Parameter(mine)
        model.out.weight = nn.Parameter(model.out.weight.detach().chunk(ranks, 1)[rank].clone())
        model.out.register_forward_hook(lambda module, inputs, y: all_reduce(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model.embed.weight, *model.head.parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()

    def whole(self, name, tensor):
        if not self.right or name != "qkv.weight":
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat([torch.cat(blocks) for blocks in zip(*(p.chunk(3) for p in parts), strict=True)])


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
