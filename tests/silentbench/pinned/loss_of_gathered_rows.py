"""The loss of gathered rows has gradients of a rank's own rows, and DDP divides them by the ranks.

The mended version multiplies the loss by the number of ranks, so that DDP's mean is right. What it returns is
then for the gradient alone: with two ranks it is twice the loss of one device. The loop logs the loss itself.
"""

import torch
import torch.distributed as dist
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def gathered(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach())
    return torch.cat(parts)


def step(model, batch):
    from pytorch_metric_learning.losses import ContrastiveLoss
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    loss, rows, labels = ContrastiveLoss(), model(batch["rows"]), batch["labels"]
    if not dist.is_initialized():
        return loss(rows, labels)
    logged = loss(gathered(rows), gathered(labels))
    return {"loss": DistributedLossWrapper(loss)(rows, labels), "logged": logged}


class Gathered(strategies.DDP):
    def backward(self, model, step, parts):
        losses = step(model, parts[0])
        losses["loss"].backward()
        return losses["logged"]

    def evaluate(self, model, step, share):
        with torch.no_grad():
            return float(step(model, share)["logged"]), 1.0


def batch(seed):
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    return {"rows": rows, "labels": torch.arange(8) % 2}


def cases():
    case = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return case | {"parallel": Gathered()}
