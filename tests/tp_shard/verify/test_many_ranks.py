"""A whole step of models of many families is that of one device on many ranks, all in this process."""

import pytest
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
}

WIDE = [("Llama", 64), ("Mistral", 64), ("Qwen 2", 64)]


@pytest.mark.nightly
@pytest.mark.needs("transformers")
@pytest.mark.takes(60)
@pytest.mark.parametrize(("family", "ranks"), [*((name, 8) for name in FAMILIES), *WIDE])
def test_a_step_on_many_pretended_ranks_is_that_of_one_device(family, ranks):
    import transformers

    name, configuration, sizes = FAMILIES[family]
    seed_torch(0)
    model = getattr(transformers, name)(getattr(transformers, configuration)(**sizes))
    tokens = torch.randint(3, TOKENS, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = ts.plans.auto(model, batch, group=ts.distributed.Group(0, ranks), verbose=False)
    assert any(isinstance(style, ts.Column) for style in plan.values())
    ts.verify(model, plan, batch, ranks=ranks).assert_ok()
