"""With mixed precision on FSDP, Fabric makes the weights themselves in bfloat16."""

import torch
from lightning_fabric.plugins.precision.fsdp import FSDPPrecision


def shown():
    with FSDPPrecision("bf16-mixed").module_init_context():
        model = torch.nn.Linear(2, 2)
    return str(model.weight.dtype)
