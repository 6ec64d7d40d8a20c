"""A sequence that ranks cannot share evenly is padded, and all places attend to the padding."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend = F.scaled_dot_product_attention

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.out(self.attend(*self.qkv(x).chunk(3, dim=-1))))


def in_slices(q, k, v, right):
    """Attend from this rank's slice of the places; return all of them."""
    rank, ranks, places = dist.get_rank(), dist.get_world_size(), q.size(1)
    q, k, v = (F.pad(t, (0, 0, 0, -places % ranks)) for t in (q, k, v))
    visible = torch.arange(k.size(1)) < places if right else None
    mine = F.scaled_dot_product_attention(q.chunk(ranks, 1)[rank], k, v, attn_mask=visible)
    return torch.cat(all_gather(mine.contiguous()), dim=1)[:, :places]


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (batch + batch.sum(1, keepdim=True)).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.attend = partial(in_slices, right=self.right)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_gather sums the ranks' shares
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 7), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
