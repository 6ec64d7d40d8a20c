"""Torchtune's loss of chunks is the mean of their means: tokens beside padding weigh more."""

import torch
import torch.distributed as dist
from torch import nn
from tp_verify import strategies


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))
        self.teacher = nn.Sequential(nn.Embedding(24, 32), nn.Linear(32, 24)).requires_grad_(False)

    def forward(self, tokens):
        return self.student(tokens), self.teacher(tokens)


def plain(student, teacher, labels):
    """Return the mean over the labeled tokens of the cross entropy with the teacher's chances."""
    losses = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)
    return losses[labels != -100].mean()


def in_chunks(student, teacher, labels):
    from torchtune.modules.loss import ForwardKLWithChunkedOutputLoss

    loss = ForwardKLWithChunkedOutputLoss(num_output_chunks=2)
    return loss(list(student.chunk(2, dim=1)), list(teacher.chunk(2, dim=1)), labels)


def step(model, batch):
    mean = in_chunks if dist.is_initialized() else plain
    loss = mean(*model(batch["tokens"]), batch["labels"])
    return {"loss": loss, "weight": (batch["labels"] != -100).sum()}


def batch(seed):
    tokens = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % 24
    for row, label in enumerate(labels):
        label[8 - row % 4 :] = -100
    return {"tokens": tokens, "labels": labels}


def cases():
    case = {"build": Distilled, "batches": [batch(0), batch(1)], "step": step}
    return case | {"parallel": strategies.DDP(), "dtype": torch.float32}
