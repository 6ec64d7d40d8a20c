"""DeepSpeed 0.19's ZeRO 3 of a model with experts that a loop calls, where each rank's tokens choose others.

    pip install torch transformers deepspeed tp-verify
    tp verify zero_experts.py:cases
    tp verify zero_experts.py:fails

ZeRO 3 fetches weights in the order in which modules ran in the first step. In a loop over the experts that
tokens chose, the activation function runs once for each, and the order differs from rank to rank. Then
DeepSpeed raises "Detected a disagreement on list length", or, in a later step, ranks wait for each other
without end. DeepSpeed knows the blocks of Mixtral, Qwen 2 MoE and Qwen 3 MoE by name. Those of others, here
OLMoE, have to be named as "leaf modules".
"""

import torch
from tp_verify import strategies

LEAVES = {"stage": 3, "leaf_module": {"name_suffixes": ["mlp.experts"]}}


def build():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 1, "pad_token_id": 0, "eos_token_id": 2}
    return OlmoeForCausalLM(OlmoeConfig(vocab_size=48, experts_implementation="eager", **sizes))


def step(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def case(way, timeout_s):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, 48, (2, 6), generator=generator) for _ in range(3)]
    given = {"build": build, "batches": batches, "step": step, "parallel": way, "timeout_s": timeout_s}
    return given | {"dtype": torch.float32}


def cases():
    return case(strategies.DeepSpeed(3, gradient_clipping=0.0, zero_optimization=LEAVES), 300)


def fails():
    return case(strategies.DeepSpeed(3, gradient_clipping=0.0), 60) | {"vary": False}
