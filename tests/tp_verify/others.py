"""Verify others' stacks, over models of transformers: ``python -m tests.tp_verify.others [STACKS...]``.

Prints a line for each stack and model: equal, what was found, or why it does not run. By default it tries all
stacks, for which transformers, accelerate, lightning and deepspeed have to be installed. It writes the
figures that the documents quote.
"""

import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from tp_core.ranks import RankPool
from tp_verify import strategies, verify

from tests.bench._results import Results
from tests.tp_verify import faults

sys.path.append(str(Path(__file__).parents[2] / "docs/examples/found"))  # also on ranks, which import this
from joint_setup import Fabric

WORDS, LENGTH, ROWS = 48, 8, 4
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
ROUTED |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}

DENSE = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": HEADS,
    "MistralForCausalLM": GROUPED | {"sliding_window": 5},
    "GemmaForCausalLM": HEADS,
    "Gemma2ForCausalLM": HEADS | {"sliding_window": 5},
    "Gemma3ForCausalLM": HEADS | {"sliding_window": 5},
    "PhiForCausalLM": SIZES,
    "Phi3ForCausalLM": GROUPED,
    "Olmo2ForCausalLM": GROUPED,
    "CohereForCausalLM": GROUPED,
    "GraniteForCausalLM": GROUPED,
    "Starcoder2ForCausalLM": GROUPED,
    "GPTNeoXForCausalLM": SIZES,
    "SmolLM3ForCausalLM": GROUPED,
}
EXPERTS = {
    "MixtralForCausalLM": GROUPED | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": HEADS | MANY,
    "OlmoeForCausalLM": GROUPED | MANY,
    "GptOssForCausalLM": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "DeepseekV3ForCausalLM": SIZES | {"num_key_value_heads": 4} | LATENT | ROUTED,
    "Glm4MoeForCausalLM": HEADS | ROUTED,
}
MODELS = DENSE | EXPERTS


def quiet():
    import transformers

    warnings.simplefilter("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class Builder:
    """A function that builds the model of a name; it can be sent to ranks."""

    def __init__(self, name):
        self.name = name

    def __call__(self):
        import transformers

        kind = getattr(transformers, self.name)
        config = kind.config_class(**MODELS[self.name], attn_implementation="eager")
        for key in vars(config):
            if "drop" in key and isinstance(getattr(config, key), float):
                setattr(config, key, 0.0)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():  # larger than by default, where routers are all but even
                parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(
                    0.1 * torch.randn(parameter.shape)
                )
        if self.name in EXPERTS:
            model.set_experts_implementation("eager")
        return model


def step(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def greedy(model, batch):
    plain = getattr(model, "module", model)
    return plain.generate(batch[:, :4], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)


def fsdp2():
    from accelerate.utils import FullyShardedDataParallelPlugin

    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")}


EAGER = {"attn_implementation": "eager"}
BATCHED = EAGER | {"experts_implementation": "batched_mm"}
LOOP = EAGER | {"experts_implementation": "eager"}
LEAVES = {"stage": 3, "leaf_module": {"name_suffixes": ["experts"]}}
STACKS = {
    "transformers tp": (strategies.Transformers(EAGER, tp_size=2), MODELS),
    "transformers fsdp": (strategies.Transformers(EAGER, fsdp_size=2), MODELS),
    "transformers tp+ep": (strategies.Transformers(EAGER, tp_size=2, ep_size=2), EXPERTS),
    "transformers tp+ep, batched": (strategies.Transformers(BATCHED, tp_size=2, ep_size=2), EXPERTS),
    "transformers tp+ep, loop": (strategies.Transformers(LOOP, tp_size=2, ep_size=2), EXPERTS),
    "transformers fsdp+ep": (strategies.Transformers(EAGER, fsdp_size=2, ep_size=2), EXPERTS),
    "accelerate ddp": (strategies.Accelerate(), MODELS),
    "accelerate fsdp2": (strategies.Accelerate(fsdp2), MODELS),
    "lightning ddp": (Fabric("ddp", is_joint=True), MODELS),
    "lightning fsdp2": (Fabric("model parallel", is_joint=False), MODELS),
    "deepspeed 1": (strategies.DeepSpeed(1), MODELS),
    "deepspeed 2": (strategies.DeepSpeed(2), MODELS),
    "deepspeed 3": (strategies.DeepSpeed(3), MODELS),
    "deepspeed 3, leaves": (strategies.DeepSpeed(3, zero_optimization=LEAVES), EXPERTS),
}


def main(*stacks):
    quiet()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2)]
    with RankPool(2, setup=quiet, timeout_s=300) as ranks, Results("verify", is_part=True) as results:
        results.add("others, models", len(MODELS), "models")
        for stack in stacks or STACKS:
            strategy, models = STACKS[stack]
            tally = Counter(one(stack, strategy, name, batches, ranks) for name in models)
            for kind in ("equal", "part", "raise"):
                results.add(f"others, {stack}, {kind}", tally[kind], "models")


def one(stack, strategy, name, batches, ranks):
    """Print what becomes of a model, and return its kind."""
    options = {"optimizer": faults.m.sgd, "max_norm": 0.5, "dtype": torch.float32, "generate": greedy}
    try:
        report = verify(Builder(name), batches, parallel=strategy, step=step, ranks=ranks, **options)
        kind, said = ("equal", "; ".join(report.not_covered)) if report else ("part", report.finding)
    except Exception as error:  # noqa: BLE001 - it is in the table
        lines = str(error).strip().splitlines()
        kind, said = "raise", f"{type(error).__name__}: {' '.join(lines[-1:])[:300]}"
    print(f"{kind} | {stack} | {name} | {said}", flush=True)
    return kind


if __name__ == "__main__":
    main(*sys.argv[1:])
