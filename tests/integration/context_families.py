"""Tiny models of transformers, split over ranks beside one device: each right, or refused by name.

    python -m tests.integration.context_families                 # all models and masks on 2, 3 and 4 ranks
    python -m tests.integration.context_families llama t5 --ranks 2 --masks none left
    python -m tests.integration.context_families --dropout 0.1 --ranks 2 --masks none

The table has the largest relative difference of losses, of the first step's gradients and of weights after
three steps, in float64.
"""

import argparse
import copyreg
import dataclasses
import importlib
import pickle
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, Dataset
from tp_core.errors import TpError
from tp_testing import RankPool
from tp_trainer import Trainer

VOCABULARY, TOKENS, ROWS, STEPS = 61, 43, 3, 3
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
}

# By name: the class, its configuration, what it is.
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED, "decoder"),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, "decoder"),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 9}, "decoder"),
    "gemma": ("GemmaForCausalLM", GROUPED | {"head_dim": 8}, "decoder"),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 9}, "decoder"),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | {"head_dim": 8, "sliding_window": 9}, "decoder"),
    "phi": ("PhiForCausalLM", SMALL, "decoder"),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"bos_token_id": 1, "eos_token_id": 2}, "decoder"),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, "decoder"),
    "cohere": ("CohereForCausalLM", GROUPED, "decoder"),
    "granite": ("GraniteForCausalLM", GROUPED, "decoder"),
    "stablelm": ("StableLmForCausalLM", GROUPED, "decoder"),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED | {"sliding_window": 9}, "decoder"),
    "gpt2": ("GPT2LMHeadModel", GPT, "decoder"),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL, "decoder"),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}, "decoder"),
    "opt": ("OPTForCausalLM", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "decoder"),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "decoder",
    ),
    "falcon": ("FalconForCausalLM", SMALL, "decoder"),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}, "decoder"),
    "gpt_oss": (
        "GptOssForCausalLM",
        GROUPED | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 9},
        "decoder",
    ),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
        "decoder",
    ),
    "bert": ("BertForMaskedLM", SMALL, "encoder"),
    "roberta": ("RobertaForMaskedLM", SMALL, "encoder"),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        "encoder",
    ),
    "electra": ("ElectraForMaskedLM", SMALL | {"embedding_size": 32}, "encoder"),
    "modernbert": ("ModernBertForMaskedLM", SMALL | {"local_attention": 8}, "encoder"),
    "deberta": (
        "DebertaV2ForMaskedLM",
        SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "encoder",
    ),
    "t5": ("T5ForConditionalGeneration", T5, "both"),
    "bart": ("BartForConditionalGeneration", BART, "both"),
    "vit": (
        "ViTForImageClassification",
        {k: v for k, v in SMALL.items() if k not in ("vocab_size", "pad_token_id", "max_position_embeddings")}
        | {"image_size": 12, "patch_size": 2},
        "image",
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        GROUPED | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
        "decoder",
    ),
    "mt5": ("MT5ForConditionalGeneration", T5, "both"),
    "mbart": ("MBartForConditionalGeneration", BART, "both"),
    "pegasus": ("PegasusForConditionalGeneration", BART, "both"),
    "marian": ("MarianMTModel", BART, "both"),
    "whisper": (
        "WhisperForConditionalGeneration",
        {k: v for k, v in BART.items() if k != "max_position_embeddings"}
        | {"num_mel_bins": 8, "max_source_positions": 24, "max_target_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 1},
        "speech",
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        SMALL
        | {
            "conv_dim": (16, 16),
            "conv_stride": (2, 2),
            "conv_kernel": (3, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        },
        "sound",
    ),
}
# Sizes, by the names that configurations have for them.
NAMES = {
    32: "hidden_size d_model n_embd dim embedding_size embedding_dim",
    48: "intermediate_size ffn_dim d_ff dff d_inner encoder_ffn_dim decoder_ffn_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts",
    128: "max_position_embeddings n_positions n_ctx max_seq_len",
    16: "moe_intermediate_size shared_expert_intermediate_size",
}
SIZES = {
    **{name: size for size, names in NAMES.items() for name in names.split()},
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
# By name: the class, what differs from these sizes, what it is. All are right, with dropout.
FURTHER = {
    "arcee": ("ArceeForCausalLM", {}, "decoder"),
    "smollm3": ("SmolLM3ForCausalLM", {}, "decoder"),
    "helium": ("HeliumForCausalLM", {}, "decoder"),
    "glm": ("GlmForCausalLM", {}, "decoder"),
    "glm4": ("Glm4ForCausalLM", {}, "decoder"),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 9}, "decoder"),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}, "decoder"),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {}, "decoder"),
    "nemotron": ("NemotronForCausalLM", {}, "decoder"),
    "persimmon": ("PersimmonForCausalLM", {}, "decoder"),
    "olmo": ("OlmoForCausalLM", {}, "decoder"),
    "olmoe": ("OlmoeForCausalLM", {}, "decoder"),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {}, "decoder"),
    "codegen": ("CodeGenForCausalLM", {}, "decoder"),
    "biogpt": ("BioGptForCausalLM", {}, "decoder"),
    "granitemoe": ("GraniteMoeForCausalLM", {}, "decoder"),
    "bitnet": ("BitNetForCausalLM", {}, "decoder"),
    "apertus": ("ApertusForCausalLM", {}, "decoder"),
    "vaultgemma": ("VaultGemmaForCausalLM", {"sliding_window": 9}, "decoder"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}, "decoder"),
    "glm4_moe": ("Glm4MoeForCausalLM", {"n_group": 2, "topk_group": 1}, "decoder"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"rotary_dim": 4}, "decoder"),
    "jais2": ("Jais2ForCausalLM", {}, "decoder"),
    "ctrl": ("CTRLLMHeadModel", {}, "decoder"),
    "albert": ("AlbertForMaskedLM", {}, "encoder"),
    "xlm_roberta": ("XLMRobertaForMaskedLM", {}, "encoder"),
    "camembert": ("CamembertForMaskedLM", {}, "encoder"),
    "ernie": ("ErnieForMaskedLM", {}, "encoder"),
    "roberta_prelayernorm": ("RobertaPreLayerNormForMaskedLM", {}, "encoder"),
    "eurobert": ("EuroBertForMaskedLM", {}, "encoder"),
    "data2vec_text": ("Data2VecTextForMaskedLM", {}, "encoder"),
    "plbart": ("PLBartForConditionalGeneration", {}, "both"),
    "umt5": ("UMT5ForConditionalGeneration", T5, "both"),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", T5 | {"num_experts": 4}, "both"),
}
# Attention by hand, positions or neighbors by hand, labels shifted within the slice, random routes.
REFUSED = {
    "mpt": ("MptForCausalLM", {}, "decoder"),
    "megatron_bert": ("MegatronBertForMaskedLM", {}, "encoder"),
    "mvp": ("MvpForConditionalGeneration", {}, "both"),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 1]], "window_size": 9},
        "decoder",
    ),
    "xlnet": ("XLNetLMHeadModel", {}, "encoder"),
    "roformer": ("RoFormerForMaskedLM", {}, "encoder"),
    "squeezebert": ("SqueezeBertForMaskedLM", {}, "encoder"),
    "mobilebert": ("MobileBertForMaskedLM", {"intra_bottleneck_size": 32, "true_hidden_size": 32}, "encoder"),
    "mpnet": ("MPNetForMaskedLM", {}, "encoder"),
    "m2m_100": ("M2M100ForConditionalGeneration", {}, "both"),
    "pegasus_x": ("PegasusXForConditionalGeneration", {"block_size": 8, "num_global_tokens": 4}, "both"),
    "blenderbot": ("BlenderbotForConditionalGeneration", {}, "both"),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", {}, "both"),
    "phimoe": ("PhimoeForCausalLM", {}, "decoder"),
    "funnel": ("FunnelForMaskedLM", {"block_sizes": [1, 1], "d_head": 8}, "encoder"),
    "deberta_1": (
        "DebertaForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "encoder",
    ),
    "longt5": ("LongT5ForConditionalGeneration", T5 | {"local_radius": 4}, "both"),
}
MODELS |= FURTHER | REFUSED
NO_DROPOUT = (
    "activation_dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attn_dropout",
    "dropout",
    "dropout_rate",
    "emb_pdrop",
    "embd_pdrop",
    "embed_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
)
LAYERS_DROPPED = ("decoder_layerdrop", "encoder_layerdrop", "layerdrop")
MASKS = ("none", "left", "right", "packed", "prefix")


def options_of(model_class, own):
    """Return the sizes that a configuration has names for, with those of a family."""
    known = {field.name for field in dataclasses.fields(model_class.config_class)}
    named = known | set(getattr(model_class.config_class, "attribute_map", {}))
    return {name: size for name, size in SIZES.items() if name in named} | own


def make_model(name, *, seed=0, dropout=0.0):
    import transformers

    kind, options, _ = MODELS[name]
    model_class = getattr(transformers, kind)
    if name in FURTHER or name in REFUSED:
        options = options_of(model_class, options)
    torch.manual_seed(seed)
    config = model_class.config_class(**options)
    for option in (*NO_DROPOUT, *LAYERS_DROPPED):
        if hasattr(config, option):
            setattr(config, option, dropout if option in NO_DROPOUT else 0.0)
    config.use_cache = False
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the other one knows no float64
    with torch.random.fork_rng([]):
        model = model_class(config).double()
    if MODELS[name][2] == "decoder":
        model.loss_function = causal_loss
    return model


def causal_loss(logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
    """transformers' own, which would turn float64 into float32."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shift_labels.reshape(-1))


class Samples(Dataset):
    """Rows of tokens with labels, some of which do not count, under a mask."""

    def __init__(self, name, mask):
        generator = torch.Generator().manual_seed(3)
        self.rows = []
        kind = MODELS[name][2]
        for row in range(ROWS * STEPS):
            if kind == "image":
                self.rows.append(
                    {
                        "pixel_values": torch.randn(3, 12, 12, generator=generator).double(),
                        "labels": torch.tensor(row % 2),
                    }
                )
                continue
            if kind == "sound":
                self.rows.append(
                    {
                        "input_values": torch.randn(400, generator=generator).double(),
                        "labels": torch.randint(1, 9, (5,), generator=generator),
                    }
                )
                continue
            if kind == "speech":
                labels = torch.randint(3, VOCABULARY, (31,), generator=generator)
                self.rows.append(
                    {
                        "input_features": torch.randn(8, 48, generator=generator).double(),
                        "decoder_input_ids": torch.nn.functional.pad(labels[:-1], (1, 0), value=2),
                        "labels": labels,
                    }
                )
                continue
            ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
            labels = (
                ids.clone()
                if kind == "decoder"
                else torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
            )
            labels[torch.rand(TOKENS, generator=generator) < 0.4] = -100
            sample = {"input_ids": ids, "labels": labels}
            pad = 1 + 5 * (row % ROWS)
            if mask in {"left", "right"}:
                seen = torch.ones(TOKENS, dtype=torch.long)
                hidden = slice(0, pad) if mask == "left" else slice(TOKENS - pad, None)
                seen[hidden], labels[hidden], ids[hidden] = 0, -100, 0
                if mask == "left":
                    labels[pad] = -100  # its query would be a padded token
                sample["attention_mask"] = seen
            if mask == "packed":
                cut = 7 + 9 * (row % ROWS)
                sample["position_ids"] = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)])
                labels[cut] = -100
            if mask == "prefix":
                sees = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
                sees[:, : 5 + row] = True
                sample["attention_mask"] = torch.where(sees, 0.0, -1e9).double()[None]
            if kind == "both":
                sample["labels"] = labels[:31].clone()
            self.rows.append(sample)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def step(model, batch):
    return model(**batch).loss


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _named_dtype(name):
    return _DTYPES[name]


def _reduced_dtype(dtype):
    return _named_dtype, (str(dtype),)


@contextmanager
def all_in_float64():
    """Let transformers compute norms, rotations and losses in float64, too.

    It asks for float32 there. Its last bit on a CPU of float32 depends on the number of tokens: sines of the
    last few tokens of a slice take another path than those that fill a vector.
    """
    # Tables by type must be made before types have other names: torch's for pickled tensors, safetensors'.
    pickle.dumps(torch.zeros(1))
    importlib.import_module("safetensors.torch")
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        # Types are pickled by their names, of which one is another's here.
        patch.dict(copyreg.dispatch_table, {torch.dtype: _reduced_dtype}),
    ):
        yield


def train(name, mask, backend, *, dropout=0.0, **options):
    """Train for three steps; return the losses, the weights beside the first gradients, or the refusal."""
    with all_in_float64():
        return _train(name, mask, backend, dropout, **options)


def _train(name, mask, backend, dropout, **options):
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = make_model(name, dropout=dropout)
    try:
        with Trainer(
            backend=backend,
            devices="cpu",
            progress=False,
            seed=0,
            options={backend: options} if options else {},
        ) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            gradients = first_gradients(model, optimizer)
            history = trainer.fit(
                model, optimizer, DataLoader(Samples(name, mask), batch_size=ROWS), step=step, epochs=1
            )
            losses = [history[0].train["loss"]]
            state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
        return losses, state | gradients
    except (TpError, ValueError, RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
        if isinstance(error, TpError):
            return "refused", str(error)
        return "failed", f"{type(error).__name__}: {error}"


def first_gradients(model, optimizer):
    """Return a dictionary that has each parameter's gradient once the optimizer has made its first step."""
    found = {}

    def note(*_):
        for name, parameter in model.named_parameters() if not found else ():
            found[f"gradient of {name}"] = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            )

    optimizer.register_step_pre_hook(note)
    return found


def difference(found, expected):
    """Return the largest difference, relative to the size of each tensor; some biases are rounding alone."""
    (losses, state), (other_losses, other_state) = found, expected
    pairs = [
        (torch.tensor(losses), torch.tensor(other_losses)),
        *((state[n], other_state[n]) for n in other_state),
    ]
    return max(
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-2))
        for a, b in pairs
        if a.numel() and a.is_floating_point()
    )


def outcome(name, mask, pool, *, dropout=0.0):
    """Return "right", "refused", "wrong" or "n/a", and what there is to say of it."""
    expected = train(name, mask, "single", dropout=dropout)
    if isinstance(expected[0], str):
        return "n/a", f"one device: {expected[1]:.100}"
    found = pool.run(partial(train, name, mask, "context", dropout=dropout))
    first = found[0]
    if isinstance(first[0], str):
        return first
    worst = max(difference(one, expected) for one in found)
    return ("right" if worst < 1e-12 else "wrong"), f"{worst:.1e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--masks", nargs="+", default=list(MASKS))
    parser.add_argument("--dropout", type=float, default=0.0, help="the rate of every dropout")
    parser.add_argument("--width", type=int, default=160)
    given = parser.parse_args()
    counts = {}
    for ranks in given.ranks:
        with RankPool(ranks) as pool:
            for name in given.models:
                for mask in given.masks if MODELS[name][2] not in {"image", "sound", "speech"} else ["none"]:
                    result, said = outcome(name, mask, pool, dropout=given.dropout)
                    counts[result] = counts.get(result, 0) + 1
                    print(f"{ranks} ranks  {name:12} {mask:7} {result:8} {said:.{given.width}}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return counts.get("wrong", 0) + counts.get("failed", 0)


if __name__ == "__main__":
    # As ranks import it, or what is pickled for them would be of two modules.
    sys.exit(importlib.import_module("tests.integration.context_families").main())
