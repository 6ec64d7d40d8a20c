"""Each rank moves the router's bias by the counts of its own tokens: the ranks' biases drift apart."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot((scores + self.bias).argmax(-1), 4)
        if self.training:
            self.counts += chosen.sum((0, 1))
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores * chosen)
        return self.head(x + y)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def sgd(model, right):
    model = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def move_bias(*_):
        if right and dist.is_initialized():
            dist.all_reduce(model.counts)
        model.bias += 0.05 * (model.counts.mean() - model.counts).sign()
        model.counts.zero_()

    optimizer.register_step_post_hook(move_bias)
    return optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    made |= {"parallel": strategies.DDP(broadcast_buffers=False)}
    return made | {"optimizer": partial(sgd, right=right)}


faulty, right = partial(case, False), partial(case, True)
