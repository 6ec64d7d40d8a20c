"""Small models of many families of transformers, whose heads and features divide by 64 ranks."""

from typing import Any

import torch
import tp_shard as ts
from tp_core.random import seed_torch

TOKENS, HEADS = 192, 64
SIZES = {"vocab_size": TOKENS, "hidden_size": 128, "num_attention_heads": HEADS, "num_hidden_layers": 1}
DECODER = SIZES | {"intermediate_size": 128, "max_position_embeddings": 16}
DECODER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KEYS = DECODER | {"num_key_value_heads": HEADS}
WITH_DIM = KEYS | {"head_dim": 2}
OLDER = {"vocab_size": TOKENS, "n_embd": 128, "n_layer": 1, "n_head": HEADS, "n_positions": 16}
OLDER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = SIZES | {"intermediate_size": 128, "max_position_embeddings": 16, "pad_token_id": 0}
ROUTED = WITH_DIM | {"num_experts_per_tok": 2, "output_router_logits": True}
ROUTED |= {"experts_implementation": "eager"}  # the other ones take no float64

FAMILIES = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", KEYS),
    "Mistral": ("MistralForCausalLM", "MistralConfig", KEYS),
    "Qwen 2": ("Qwen2ForCausalLM", "Qwen2Config", KEYS),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", WITH_DIM),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", WITH_DIM),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", WITH_DIM),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", WITH_DIM),
    "Phi": ("PhiForCausalLM", "PhiConfig", DECODER | {"partial_rotary_factor": 1.0}),
    "Phi 3": ("Phi3ForCausalLM", "Phi3Config", KEYS),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER | {"rotary_pct": 1.0}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", OLDER),
    "OPT": ("OPTForCausalLM", "OPTConfig", DECODER | {"ffn_dim": 128, "word_embed_proj_dim": 128}),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", OLDER | {"rotary_dim": 2}),
    "BLOOM": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": TOKENS, "hidden_size": 128, "n_layer": 1, "n_head": HEADS},
    ),
    "StarCoder 2": ("Starcoder2ForCausalLM", "Starcoder2Config", KEYS),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", KEYS),
    "Cohere": ("CohereForCausalLM", "CohereConfig", KEYS),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", KEYS | {"partial_rotary_factor": 1.0}),
    "BERT": ("BertForMaskedLM", "BertConfig", ENCODER),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", ENCODER | {"pad_token_id": 1}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", ROUTED | {"num_local_experts": 4}),
    "Qwen 3 MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        ROUTED | {"num_experts": 4, "moe_intermediate_size": 128},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        ROUTED | {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["sliding_attention"]},
    ),
}


def report_of(family: str, ranks: int) -> Any:
    """Return the report on a step of a family's model, split by a plan that is found on two ranks."""
    import transformers

    name, configuration, sizes = FAMILIES[family]
    seed_torch(0)
    model = getattr(transformers, name)(getattr(transformers, configuration)(**sizes))
    tokens = torch.randint(3, TOKENS, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = ts.plans.auto(model, batch, group=ts.distributed.Group(0, 2), verbose=False)
    if not any(isinstance(style, ts.Column) for style in plan.values()):
        msg = f"nothing of {family} is split: {plan}"
        raise ValueError(msg)
    return ts.verify(model, plan, batch, ranks=ranks)
