"""Models of transformers under a proposed plan are right to rounding."""

import copy
from importlib.util import find_spec

import pytest
import torch
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.plugins import Job
from tp_testing import RankPool

from tests.installed import backend_class
from tests.integration import context_families as others

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED = {"num_key_value_heads": 2}
GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "rotary_dim": 4, "bos_token_id": 1}
FAMILIES = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, **SHARED}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, **SHARED, "head_dim": 8}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**SIZES, **SHARED, "head_dim": 8}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, **SHARED, "head_dim": 8}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, **SHARED}),
    "OLMo2": ("Olmo2ForCausalLM", "Olmo2Config", {**SIZES, **SHARED}),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", {**SIZES, **SHARED, "qk_layernorm": True}),
    "Bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    ),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**GPTJ, "eos_token_id": 2}),
}


def _join():
    import tp_shard as ts

    torch.set_num_threads(1)
    ts.distributed.init_process_group()


def _build(family):
    import transformers

    name, config, options = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _compare(family):
    """Return the largest errors of loss and gradients, the paths of the plan, and whether tokens agree."""
    import tp_shard as ts

    whole = _build(family)
    split = copy.deepcopy(whole)
    plan = ts.plans.auto(split, verbose=False)
    ts.parallelize(split, plan)
    ids = torch.randint(3, 96, (2, 6))
    losses = [model(input_ids=ids, labels=ids).loss for model in (whole, split)]
    for loss in losses:
        loss.backward()
    ts.check_gradients(split)
    gradients = ts.collect_state_dict(split, {n: p.grad for n, p in split.named_parameters()})
    error = max(
        ((gradients[n] - p.grad).norm() / (p.grad.norm() + 1e-6)).item() for n, p in whole.named_parameters()
    )
    tokens = [
        m.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (whole, split)
    ]
    return (losses[0] - losses[1]).abs().item(), error, list(plan), torch.equal(*tokens)


def _padded(attention):
    """Return how far logits and gradients of a padded batch are off, with one key head on two ranks."""
    import tp_shard as ts
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, attn_implementation=attention)
    whole = transformers.LlamaForCausalLM(config).double()
    split = copy.deepcopy(whole)
    plan = ts.plans.auto(split, verbose=False)
    assert plan["model.layers.0.self_attn.k_proj"].kv_heads == 1
    ts.parallelize(split, plan)
    ids, mask = torch.randint(3, 96, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    logits = [model(input_ids=ids, attention_mask=mask).logits[:, :4] for model in (whole, split)]
    for each in logits:
        each.square().mean().backward()
    gradients = ts.collect_state_dict(split, {n: p.grad for n, p in split.named_parameters()})
    errors = [(gradients[n] - p.grad).abs().max() for n, p in whole.named_parameters()]
    return (logits[0] - logits[1]).abs().max().item(), max(errors).item()


def _first_steps(name):
    """Run the first steps of a family, in which the way of its split outputs is followed."""
    import tp_shard as ts

    kind = others.MODELS[name][2]
    rows = others.Samples(name, "left" if kind in {"decoder", "encoder"} else "none")
    batch = torch.utils.data.default_collate([rows[0], rows[1]])
    model = others.make_model(name, dropout=0.1)
    plan = ts.plans.auto(model, dict(batch), verbose=False)
    job = Job(devices=resolve_devices(["cpu"]), environment=LaunchEnvironment.read())
    with backend_class("shard")().open(job) as session:
        model = session.prepare_model(ts.parallelize(model, plan))
        session.run(others.step, model, batch)
        model.eval()
        with torch.inference_mode():
            session.run(others.step, model, batch)


def _save(folder):
    import tp_shard as ts
    import transformers

    model = _build("Llama")
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    ts.parallelize(model, ts.plans.auto(model, verbose=False))
    with pytest.raises(RuntimeError, match="would write this rank's shards"):
        model.save_pretrained(folder)
    state = ts.collect_state_dict(model, model.state_dict(), to="rank0")
    if ts.distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
        for name, value in plain.items():
            torch.testing.assert_close(loaded[name], value)


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(2, setup=_join)
    yield ranks
    ranks.close()


# Others are trained in tests/tp_shard/search/test_families.py, as are padded batches.
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "Llama" else pytest.mark.nightly) for f in FAMILIES]
)
def test_a_family_is_right_under_the_proposed_plan(pool, family):
    for loss, gradient, paths, same_tokens in pool.run(_compare, family):
        assert loss < 1e-6
        assert gradient < 1e-6
        assert same_tokens
        assert any("att" in path for path in paths), "its attention is left whole"


@pytest.mark.parametrize(
    "name",
    [
        "gpt_bigcode",  # key heads that all ranks have
        *(pytest.param(name, marks=pytest.mark.nightly) for name in others.MODELS if name != "gpt_bigcode"),
    ],
)
def test_what_a_family_does_with_split_outputs_is_no_fault(pool, name):
    pool.run(_first_steps, name)


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_batches_are_right_with_fewer_key_heads_than_ranks(pool, attention):
    for errors in pool.run(_padded, attention):
        assert max(errors) < 1e-6


def test_a_split_model_is_saved_whole_as_its_error_says(pool, tmp_path):
    pool.run(_save, tmp_path)
