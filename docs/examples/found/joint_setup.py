"""Lightning Fabric 2.6, ModelParallelStrategy: an optimizer that is set up with its model trains nothing.

    pip install torch lightning tp-verify
    tp verify joint_setup.py:cases

The strategy puts sharded parameters in the place of the model's own. ``fabric.setup(model, optimizer)``
leaves the optimizer with the old ones, without an error. Set up the model first, and make the optimizer then.
The last case is Fabric's DDP.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def sharded(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])


class Fabric(Strategy):
    """Fabric on as many processes as there are ranks."""

    data = "rows"

    def __init__(self, strategy, is_joint):
        super().__init__(name=f"Fabric, {strategy}, set up {'together' if is_joint else 'one by one'}")
        self.strategy, self.is_joint = strategy, is_joint

    def prepare(self, model, make):
        import lightning
        from lightning.fabric.strategies import ModelParallelStrategy

        ranks, strategy = dist.get_world_size(), self.strategy
        if strategy == "model parallel":
            strategy = ModelParallelStrategy(sharded, data_parallel_size=ranks, tensor_parallel_size=1)
        self.fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        self.fabric.launch()
        if self.is_joint:
            return self.fabric.setup(model, make(model))
        model = self.fabric.setup_module(model)
        return model, self.fabric.setup_optimizers(make(model))

    def plain_name(self, name):
        for wrapper in ("_forward_module", "_original_module"):
            name = "" if name == wrapper else name.replace(f"{wrapper}.", "")
        return super().plain_name(name)


def cases():
    batch = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(0))
    case = {"build": build, "batches": [batch], "step": step, "dtype": torch.float32}
    tried = ("model parallel", True), ("model parallel", False), ("ddp", True)
    return [case | {"parallel": Fabric(*one)} for one in tried]
