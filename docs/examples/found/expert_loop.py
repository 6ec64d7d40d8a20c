"""GPT-OSS in transformers 5.24, with expert parallelism and eager experts: it raises at its first step.

    pip install torch transformers tp-verify
    tp verify expert_loop.py:cases

Tokens of other ranks' experts have a number of their own. GPT-OSS counts them with the rest, which ends with
"Class values must be smaller than num_classes".
"""

import torch
from tp_verify import strategies
from transformers import GptOssConfig, GptOssForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 16,
}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def build():
    config = GptOssConfig(**SIZES, **LAYERS, num_local_experts=4, num_experts_per_tok=2, **EAGER)
    return GptOssForCausalLM(config)


def step(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def cases():
    way = strategies.Transformers(EAGER, tp_size=2, ep_size=2)
    batches = [torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(0))]
    return {"build": build, "batches": batches, "step": step, "parallel": way, "dtype": torch.float32}
