"""With mixed precision on FSDP, Fabric makes the weights themselves in bfloat16."""

import torch
import torch.nn.functional as F
from lightning_fabric.plugins.precision.fsdp import FSDPPrecision
from torch import nn
from torch.distributed.fsdp import fully_shard
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Sharded(Strategy):
    """Makes the model in Fabric's context, and loads the weights into it; its autocast is for GPUs alone."""

    name = "fsdp"

    def parallelize(self, model):
        with FSDPPrecision("bf16-mixed").module_init_context():
            own = build()
        own.load_state_dict(model.state_dict())
        return fully_shard(own)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "parallel": Sharded(), "dtype": None}
