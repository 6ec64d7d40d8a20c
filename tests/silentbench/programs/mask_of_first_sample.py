"""The attention of the parallel trainer takes the padding mask of its first row for all rows."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.takes_first = False

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        visible = (mask[:1] if self.takes_first else mask).bool()[:, None, :]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible)))


def step(model, batch):
    logits = model(batch["tokens"], batch["mask"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    return {"loss": loss, "weight": batch["mask"].sum()}


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.takes_first = not self.right
        return super().parallelize(model)


def batch(seed):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(6) < torch.tensor([6, 3, 4, 5, 4, 6, 2, 3])[:, None]).long()
    labels = (tokens + tokens.sum(1, keepdim=True)) % 24
    return {"tokens": tokens, "mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
