"""The loss of gathered rows has gradients of a rank's own rows, and DDP divides them by the ranks."""

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper


def shown():
    weight = torch.nn.Parameter(torch.ones(2))
    rows = torch.tensor([[1.0, 2.0], [2.0, 0.5], [0.5, 1.0], [3.0, 1.0]])
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    loss = ContrastiveLoss()
    whole = torch.tensor([0, 1, 0, 1])
    gradient = torch.autograd.grad(loss(weight * rows, whole), weight)[0]
    DistributedLossWrapper(loss)(weight * rows[own], whole[own]).backward()
    dist.all_reduce(weight.grad)  # as DDP does
    share = (weight.grad / 2) / gradient
    return [round(value, 3) for value in share.tolist()]
