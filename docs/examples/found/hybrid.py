"""Accelerate 1.15 with a ``ParallelismConfig``: weights sharded over two ranks, then over two of four.

    pip install torch accelerate tp-verify
    tp verify hybrid.py:cases

On a CPU, Accelerate refuses it, and leaves FSDP out without a word. ``strategies.Accelerate`` has it choose
as on a GPU.
"""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def sharded(copies=1):
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
        "parallelism_config": ParallelismConfig(dp_shard_size=2, dp_replicate_size=copies),
    }


def hybrid():
    return sharded(copies=2)


def cases():
    batch = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(0))
    case = {"build": build, "batches": [batch], "step": step, "dtype": torch.float32, "max_norm": 0.5}
    return [
        case | {"parallel": strategies.Accelerate(sharded)},
        case | {"parallel": strategies.Accelerate(hybrid), "ranks": 4},
    ]
