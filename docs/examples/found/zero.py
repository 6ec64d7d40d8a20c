"""DeepSpeed 0.19's ZeRO on the CPU: stages 1 to 3, with accumulation, clipping and uneven tokens.

    pip install torch deepspeed tp-verify
    tp verify zero.py:cases

``strategies.DeepSpeed`` has gloo communicate. By itself, DeepSpeed first compiles a kernel for shared memory.
After a build that was ended early, it waits without end for the lock of that build.

The last case does not clip, and parts: DeepSpeed clips to a norm of 1 where its configuration does not say
``"gradient_clipping": 0.0``.
"""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    is_token = batch != 3
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=3)
    return {"loss": loss, "weight": is_token.sum()}


def louder(model, batch):
    made = step(model, batch)
    return made | {"loss": 10 * made["loss"]}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (4, 6), generator=generator) for _ in range(3)]
    case = {"build": build, "batches": batches, "step": step, "dtype": torch.float32}
    case |= {"micro": 2, "max_norm": 0.5}
    plain = case | {"step": louder, "optimizer": sgd, "max_norm": None, "parallel": strategies.DeepSpeed(2)}
    return [*(case | {"parallel": strategies.DeepSpeed(stage)} for stage in (1, 2, 3)), plain]
