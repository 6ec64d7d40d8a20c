"""A worker's seed has Lightning's in its upper bits, which torch leaves out: all runs draw the same."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.utilities.seed import pl_worker_init_function
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def step(model, batch):
    return (model(batch["rows"]) - batch["labels"]).square().mean()


class Augmented(strategies.DDP):
    """Inputs are dropped where they are loaded, in the rank itself, which Lightning seeds as a worker."""

    def parallelize(self, model):
        model[0] = nn.Identity()
        return super().parallelize(model)

    def backward(self, model, step, parts):
        pl_worker_init_function(0, rank=dist.get_rank())
        augmented = [part | {"rows": F.dropout(part["rows"], 0.2)} for part in parts]
        return super().backward(model, step, augmented)


def cases():
    numbers = torch.Generator().manual_seed(0)
    rows = [torch.randn(8, 16, generator=numbers) for _ in range(2)]
    batches = [{"rows": one, "labels": one.mean(-1, keepdim=True)} for one in rows]
    return {"build": build, "batches": batches, "step": step, "parallel": Augmented(), "dropout": 50}
