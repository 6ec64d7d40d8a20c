"""PEFT merges an adapter's bias without its scale: the merged model is another one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        return self.head(F.gelu(self.body(self.embed(tokens))))


def build():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["body"], r=2, lora_alpha=8, lora_bias=True, init_lora_weights=False)
    return get_peft_model(Words(), config)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def most_likely(model, batch):
    """Return the words that are most likely; after a training on ranks, of the merged model."""
    if dist.is_initialized():
        model = model.module.merge_and_unload()
    return model(batch).argmax(-1)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "generate": most_likely}
    return case | {"parallel": strategies.DDP()}
