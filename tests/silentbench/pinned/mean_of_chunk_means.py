"""Torchtune's loss of chunks is the mean of their means: tokens beside padding weigh more."""

import torch
from torchtune.modules.loss import ForwardKLWithChunkedOutputLoss


def shown():
    numbers = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(1, 8, 5, generator=numbers) for _ in range(2))
    labels = torch.tensor([[1, 2, 3, 4, 1, -100, -100, -100]])
    losses = []
    for chunks in (1, 2):
        loss = ForwardKLWithChunkedOutputLoss(num_output_chunks=chunks)
        parts = [tensor.chunk(chunks, dim=1) for tensor in (student, teacher)]
        losses.append(loss(list(parts[0]), list(parts[1]), labels))
    return round(float(losses[1] / losses[0]), 4)
