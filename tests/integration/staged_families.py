"""Tiny models of transformers in stages, clipped by norm and with dropout: each as on one device, or refused.

    python -m tests.integration.staged_families                 # all of them, in float64 and bfloat16
    python -m tests.integration.staged_families olmo jamba

One device runs for the same micro-batches, and draws the random numbers of stages. In float64 losses,
gradients and weights are equal to 1e-12. In bfloat16 the first clipped gradients differ by four roundings at
most, as those of micro-batches are scaled and added in that type. Copies of weights on several ranks are
equal to the bit.
"""

import argparse
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import count, pairwise

import torch
from torch.utils.data import DataLoader
from tp_core import LaunchEnvironment
from tp_core.errors import TpError
from tp_core.random import preserve_torch_rng_state, seed_of, seed_torch
from tp_core.sessions import join_process_group
from tp_pipeline._stage_units import find_units, forwards  # private: where stages draw random numbers
from tp_testing import RankPool
from tp_trainer import Trainer

from tests.integration.context_families import VOCABULARY, all_in_float64, causal_loss

ROWS, PARTS, STEPS, TOKENS, LAYERS, PIXELS = 8, 4, 3, 12, 4, 16
SCHEDULES = ("1F1B", "ZBVZeroBubble", "Interleaved1F1B")
DROPOUT, CLIP_NORM = 0.1, 0.1
ROUNDING = torch.finfo(torch.bfloat16).eps / 2
CPU = [torch.device("cpu")]
TOKEN_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
SMALL = TOKEN_IDS | WIDE | {"max_position_embeddings": 64}
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = TOKEN_IDS | {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
BART = TOKEN_IDS | {
    "d_model": 32,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
IMAGE = WIDE | {"image_size": PIXELS, "patch_size": 4}
SOUND = SMALL | {
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}

# By name: the class, its configuration, what it is. None of these is in another table.
FAMILIES = {
    "codegen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}, "decoder"),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SMALL
        | EXPERTS
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
        | {"v_head_dim": 8, "first_k_dense_replace": 1},
        "decoder",
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        GROUPED
        | {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_intermediate_size": 16},
        "decoder",
    ),
    "exaone4": ("Exaone4ForCausalLM", GROUPED | {"sliding_window": 5}, "decoder"),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        TOKEN_IDS | {"hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4},
        "decoder",
    ),
    "glm": ("GlmForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        GROUPED | EXPERTS | {"n_routed_experts": 4, "head_dim": 8, "first_k_dense_replace": 1},
        "decoder",
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT, "decoder"),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        TOKEN_IDS
        | {"hidden_size": 32, "num_layers": LAYERS, "num_heads": 4, "max_position_embeddings": 64}
        | {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 5},
        "decoder",
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "decoder",
    ),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        "decoder",
    ),
    "helium": ("HeliumForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "jamba": (
        "JambaForCausalLM",
        GROUPED
        | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {"mamba_d_state": 4, "mamba_dt_rank": 4},
        "decoder",
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        TOKEN_IDS
        | {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_heads": 8, "head_dim": 8}
        | {"state_size": 4, "n_groups": 2, "chunk_size": 8},
        "decoder",
    ),
    "mpt": (
        "MptForCausalLM",
        TOKEN_IDS | {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64},
        "decoder",
    ),
    "nemotron": ("NemotronForCausalLM", GROUPED, "decoder"),
    "olmo": ("OlmoForCausalLM", GROUPED, "decoder"),
    "olmoe": ("OlmoeForCausalLM", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, "decoder"),
    "persimmon": ("PersimmonForCausalLM", SMALL, "decoder"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 8}, "decoder"),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED, "decoder"),
    "big_bird": ("BigBirdForMaskedLM", SMALL | {"attention_type": "original_full"}, "encoder"),
    "data2vec_text": ("Data2VecTextForMaskedLM", SMALL, "encoder"),
    "ernie": ("ErnieForMaskedLM", SMALL, "encoder"),
    "eurobert": ("EuroBertForMaskedLM", GROUPED, "encoder"),
    "layoutlm": ("LayoutLMForMaskedLM", SMALL, "encoder"),
    "megatron_bert": ("MegatronBertForMaskedLM", SMALL, "encoder"),
    "mpnet": ("MPNetForMaskedLM", SMALL, "encoder"),
    "nomic_bert": ("NomicBertForMaskedLM", SMALL, "encoder"),
    "rembert": (
        "RemBertForMaskedLM",
        SMALL | {"input_embedding_size": 16, "output_embedding_size": 24},
        "encoder",
    ),
    "roc_bert": (
        "RoCBertForMaskedLM",
        SMALL | {"enable_pronunciation": False, "enable_shape": False},
        "encoder",
    ),
    "roformer": ("RoFormerForMaskedLM", SMALL, "encoder"),
    "xlm": (
        "XLMWithLMHeadModel",
        TOKEN_IDS | {"emb_dim": 32, "n_layers": LAYERS, "n_heads": 4, "max_position_embeddings": 64},
        "encoder",
    ),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART, "both"),
    "m2m_100": ("M2M100ForConditionalGeneration", BART, "both"),
    "mvp": ("MvpForConditionalGeneration", BART, "both"),
    "pegasus_x": (
        "PegasusXForConditionalGeneration",
        BART | {"num_global_tokens": 2, "block_size": 4},
        "both",
    ),
    "plbart": ("PLBartForConditionalGeneration", BART, "both"),
    "beit": ("BeitForImageClassification", IMAGE, "image"),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 8, 12, 12], "depths": [1, 2, 2, 1], "patch_size": 2, "image_size": PIXELS},
        "image",
    ),
    "deit": ("DeiTForImageClassification", IMAGE, "image"),
    "dinov2": ("Dinov2ForImageClassification", IMAGE, "image"),
    "swin": (
        "SwinForImageClassification",
        {"image_size": PIXELS, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
        | {"window_size": 2},
        "image",
    ),
    "vit_msn": ("ViTMSNForImageClassification", IMAGE, "image"),
    "hubert": ("HubertForCTC", SOUND, "sound"),
    "wavlm": ("WavLMForCTC", SOUND, "sound"),
    "ibert": ("IBertForMaskedLM", SMALL, "encoder"),
}


REFUSED = {
    "ibert": "the model's forward writes the buffer 'ibert.embeddings.embeddings_act1.x_min' (QuantAct)",
    "swin": "backend 'pipeline' has 4 stages, and the step calls 2 blocks",
    "xlm": "random numbers that are drawn between its blocks are used in several stages",
}
"""What those are told that need more than a schedule."""
REMEDIES = {
    "ibert": {"statistics": "microbatch"},
    "swin": {
        "cuts": [f"swin.encoder.layers.{place}" for place in ("0.blocks.1", "1.blocks.0", "1.blocks.1")]
    },
    "xlm": {},
}
"""Options with which they are right. XLM has no dropout of its own between blocks then; IBert keeps ranges of
micro-batches in turn, as here on one device."""


def make_model(name, dtype, *, is_remedied=True):
    """Return a model with dropout wherever its configuration has it."""
    import transformers

    kind, options, sort = FAMILIES[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**options)
    for option, value in vars(config).items():
        if "drop" in option and isinstance(value, int | float) and not isinstance(value, bool):
            leaves_out = "layerdrop" in option or (name == "xlm" and option == "dropout" and is_remedied)
            setattr(config, option, 0.0 if leaves_out else DROPOUT)
    config.use_cache = False
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the other one knows no float64
    torch.manual_seed(0)
    model = model_class(config).to(dtype)
    if sort == "decoder":
        model.loss_function = causal_loss
    model.sort = sort
    return model


def rows_of(name, dtype):
    """Return samples; in some of them next to nothing counts, and in a micro-batch nothing at all."""
    sort, draws = FAMILIES[name][2], torch.Generator().manual_seed(3)
    rows = []
    for number in range(ROWS * STEPS):
        if sort == "image":
            pixels = torch.randn(3, PIXELS, PIXELS, generator=draws).to(dtype)
            rows.append({"pixel_values": pixels, "labels": torch.tensor(number % 2)})
            continue
        if sort == "sound":
            values = torch.randn(200, generator=draws).to(dtype)
            labels = torch.randint(3, VOCABULARY, (3,), generator=draws)
            rows.append({"input_values": values, "labels": labels})
            continue
        ids, labels = torch.randint(3, VOCABULARY, (2, TOKENS), generator=draws)
        if sort == "decoder":
            labels = ids.clone()
        labels[torch.rand(TOKENS, generator=draws) < 0.3] = -100
        seen = torch.ones(TOKENS, dtype=torch.long)
        padded = slice(TOKENS - number % 4, TOKENS)
        seen[padded], labels[padded], ids[padded] = 0, -100, 0
        if number % ROWS in {4, 5} and name != "plbart":  # which looks for the last token that counts
            labels[:] = -100
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": seen})
    return rows


def step(model, batch):
    """Return the loss and the number of labels that it is a mean over."""
    labels = batch["labels"]
    counted = labels != -100
    if model.sort == "decoder":
        counted = counted[:, 1:]
    if model.sort == "sound":
        counted = labels[:, 0] != -100  # the mean over samples
    return {"loss": model(**batch).loss, "weight": counted.sum()}


def step_in_parts(model, batch):
    """Return what `step` returns on one device, for micro-batches and with the random numbers of stages."""
    seed = int(torch.randint(2**62, ()))
    units, _ = find_units(model, model.cuts)
    losses, weights = [], []
    with preserve_torch_rng_state(CPU):
        for number in range(PARTS):
            of_part = seed_of((seed, number))
            calls = count()

            def call(_name, forward, /, *args, of_part=of_part, calls=calls, **kwargs):
                at = next(calls)
                seed_torch(seed_of((of_part, at, 0)), CPU)
                output = forward(*args, **kwargs)
                seed_torch(seed_of((of_part, at, 1)), CPU)
                return output

            rows = slice(number * ROWS // PARTS, (number + 1) * ROWS // PARTS)
            part = {key: value[rows].clone() for key, value in batch.items()}  # which a model may write
            seed_torch(of_part, CPU)
            with forwards(units, call):
                output = step(model, part)
            if output["weight"]:
                losses.append(output["loss"])
                weights.append(output["weight"].to(output["loss"].dtype))
    total = sum(weights)
    loss = sum(loss * (weight / total) for loss, weight in zip(losses, weights, strict=True))
    return {"loss": loss, "weight": total}


def train(name, backend, dtype, schedule=None, *, is_remedied=True):
    """Return the loss, the clipped gradients of steps, the weights here and whole; or the refusal."""
    with all_in_float64() if dtype == torch.float64 else nullcontext():
        try:
            return _train(name, backend, dtype, schedule, is_remedied)
        except TpError as error:
            return str(error)


def _train(name, backend, dtype, schedule, is_remedied):
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = make_model(name, dtype, is_remedied=is_remedied)
    remedy = REMEDIES.get(name, {}) if is_remedied else {}
    model.cuts = remedy.get("cuts")
    options = {"pipeline": {"schedule": schedule, "microbatches": PARTS, **remedy}} if schedule else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = []

    def note(*_):
        own = {n: p.grad for n, p in model.named_parameters() if p.numel() and p.grad is not None}
        gradients.append({n: gradient.clone() for n, gradient in own.items()})

    optimizer.register_step_pre_hook(note)
    with Trainer(backend=backend, devices="cpu", progress=False, seed=0, options=options) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            DataLoader(rows_of(name, dtype), batch_size=ROWS),
            step=step if schedule else step_in_parts,
            epochs=1,
            clip_norm=CLIP_NORM,
        )
        own = {n: p.detach().clone() for n, p in model.named_parameters() if p.numel()}
        whole = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    return history[0].train["loss"], gradients, own, whole


def join():
    """Join the process group in which all families run."""
    torch.set_num_threads(1)
    join_process_group(LaunchEnvironment.read())


def distance(gradients, others):
    """Return the difference of gradients of a model, relative to all of these."""
    squares = [(gradients[n].double() - other.double()).square().sum() for n, other in others.items()]
    sizes = [other.double().square().sum() for other in others.values()]
    return float(sum(squares) / sum(sizes)) ** 0.5


def difference(found, expected):
    """Return the largest difference of states, relative to each tensor; some biases are rounding alone."""
    differences = []
    for name, value in expected.items():
        if value.is_floating_point() and value.numel():
            differences.append((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-2))
    return float(max(differences))


def first_gradients(ranks):
    """Return the clipped gradients of the first step, of all ranks."""
    return {name: gradient for _, steps, *_ in ranks for name, gradient in steps[0].items()}


def copies_differ(ranks):
    """Return a weight or gradient of which ranks have copies that differ, or nothing."""
    for (_, steps, own, _), (_, other_steps, other_own, _) in pairwise(ranks):
        for mine, theirs in zip([*steps, own], [*other_steps, other_own], strict=True):
            for name in mine.keys() & theirs.keys():
                if not torch.equal(mine[name], theirs[name]):
                    return name
    return None


def schedule_of(name):
    """Return a schedule, by turns."""
    if name == "swin":
        return "Interleaved1F1B"  # with more stages than it has blocks
    return SCHEDULES[list(FAMILIES).index(name) % len(SCHEDULES)]


def outcome(pool, name):
    """Return "right", "refused" or "wrong", and what there is to say of it."""
    schedule = schedule_of(name)
    exact = train(name, "single", torch.float64)
    exact_ranks = pool.run(partial(train, name, "pipeline", torch.float64, schedule))
    if isinstance(exact_ranks[0], str):
        return "refused", exact_ranks[0]
    rounded = train(name, "single", torch.bfloat16)
    rounded_ranks = pool.run(partial(train, name, "pipeline", torch.bfloat16, schedule))
    if isinstance(rounded_ranks[0], str):
        return "refused", rounded_ranks[0]

    loss = max(abs(rank[0] - exact[0]) / abs(exact[0]) for rank in exact_ranks)
    weights = max(difference(rank[3], exact[3]) for rank in exact_ranks)
    gradients = difference(first_gradients(exact_ranks), exact[1][0])
    worst = max(loss, weights, gradients)
    norm = sum(float(g.square().sum()) for g in exact[1][0].values()) ** 0.5
    of_stages = distance(first_gradients(rounded_ranks), rounded[1][0])
    differing = copies_differ(exact_ranks) or copies_differ(rounded_ranks)
    said = f"{schedule}: float64 {worst:.0e}, norm {norm:.3f}; bfloat16 {of_stages:.1e}"
    if differing:
        said += f"; copies of {differing} differ"
    is_right = worst <= 1e-12 and of_stages <= 4 * ROUNDING and not differing
    return ("right" if is_right else "wrong"), said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    given = parser.parse_args()
    counts, began = {}, time.monotonic()
    with RankPool(2, setup=join) as pool:
        for name in given.families:
            try:
                result, said = outcome(pool, name)
            except Exception as error:  # noqa: BLE001 - the others are to run, too
                result, said = "failed", f"{type(error).__name__}: {error}"[:1500]
            counts[result] = counts.get(result, 0) + 1
            print(f"{name:18} {result:8} {said}", flush=True)
    print(counts, f"{time.monotonic() - began:.0f} s")
    return counts.get("wrong", 0) + counts.get("failed", 0)


if __name__ == "__main__":
    sys.exit(main())
