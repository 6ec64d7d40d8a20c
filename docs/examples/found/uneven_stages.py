"""torch 2.13's pipelining: the mean of micro-batches' means is another loss where their tokens are uneven.

    pip install torch tp-verify
    tp verify uneven_stages.py:cases

The second case has as many tokens in each micro-batch, and is equal to one device. A script of torch alone,
which shows the first, is written to smallest.py.
"""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def tokens(batch):
    return batch["tokens"]


def labels(batch):
    return batch["labels"]


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def step(model, batch):
    return loss_of(model(batch["tokens"]), batch["labels"])


def cases():
    drawn = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(0))
    fewer = drawn.clone()
    fewer[0, 1:] = -100
    case = {"build": build, "step": step}
    case |= {"parallel": strategies.Pipelining(inputs=tokens, target=labels, loss=loss_of)}
    uneven, even = ([{"tokens": drawn, "labels": given}] for given in (fewer, drawn))
    return [case | {"batches": uneven, "reproduce": "smallest.py"}, case | {"batches": even}]
