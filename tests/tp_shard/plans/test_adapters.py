"""Models with adapters of peft: split as one with their layers, they compute what one device computes."""

import copy
import functools
import itertools
import warnings
from importlib.util import find_spec

import pytest
import torch
import tp_shard as ts
from torch import nn
from tp_core.errors import ModelError, StateError
from tp_shard.nn._draws import SplitDraws  # for a fault that only a change of its code makes

from tests.adapters import FAMILIES, TOKENS, adapted, configuration, draw_adapters, plain
from tests.adapters import KINDS as ADAPTERS

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

KINDS = ("lora", "rslora", "dora", "ia3")
DIFFERENT = [
    "lora",
    "dora",
    "ia3",
    pytest.param("rslora", marks=pytest.mark.nightly),
]  # "lora" by another factor
PROVEN = [k if k in ("dora", "several") else pytest.param(k, marks=pytest.mark.nightly) for k in ADAPTERS]
HEADS = {"heads": 4, "kv_heads": 2}
LLAMA = {
    "**.q_proj": ts.Column(**HEADS),
    "**.k_proj": ts.Column(**HEADS, holds="kv"),
    "**.v_proj": ts.Column(**HEADS, holds="kv"),
    "**.o_proj": ts.Row(**HEADS),
    "**.gate_proj": ts.Column(),
    "**.up_proj": ts.Column(),
    "**.down_proj": ts.Row(),
}
PLANS = {
    ("llama", "lora"): LLAMA,
    ("gpt2", "dora"): {
        "**.attn": ts.Local(heads=4, query=("num_heads", "split_size")),
        "**.attn.c_attn": ts.Column(heads=4, holds="qkv"),
        "**.attn.c_proj": ts.Row(heads=4),
        "**.mlp.c_fc": ts.Column(),
        "**.mlp.c_proj": ts.Row(),
    },
}


def inputs(family):
    torch.manual_seed(2)
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 2])}
    ids = torch.randint(5, TOKENS, (3, 7))
    return {"input_ids": ids, "labels": torch.tensor([0, 1, 1]) if family == "bert" else ids}


def whole_and_split(model):
    return model, ts.parallelize(copy.deepcopy(model), LLAMA)


def cut_tensors(split):
    """Return the names of the tensors of which this rank has a part."""
    held = split.state_dict()
    return [n for n, whole in ts.collect_state_dict(split, held).items() if whole.shape != held[n].shape]


def equal(split, whole, batch):
    """Compare the outputs of both models."""
    with torch.no_grad():
        expected, got = whole(**batch), split(**batch)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5)


def train(models, batch, steps=3):
    """Train a whole model and its split form, and compare losses, gradients and weights in each step."""
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in models]
    for _ in range(steps):
        losses = [m(**batch).loss for m in models]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)
        for loss in losses:
            loss.backward()
        whole, split = models
        ts.check_gradients(split)
        gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        assert gradients
        assert {n for n, p in split.named_parameters() if p.grad is not None} == set(gradients)
        found = ts.collect_state_dict(
            split, {n: p.grad for n, p in split.named_parameters() if n in gradients}
        )
        largest = max(g.abs().max() for g in gradients.values())
        for name, gradient in gradients.items():
            limit = {"rtol": 1e-4, "atol": float(5e-5 * largest)}
            torch.testing.assert_close(found[name], gradient, **limit, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected, state = whole.state_dict(), ts.collect_state_dict(split, split.state_dict())
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def split_weights(model, plan):
    """Return the sizes of the linear layers and tables that a plan splits, by their names without peft's."""
    found = {}
    for path, style in plan.items():
        layer = model.get_submodule(path)
        layer = getattr(layer, "base_layer", layer)
        if isinstance(style, ts.Column | ts.Row | ts.Vocab):
            name = path.removeprefix("base_model.model.").removesuffix(".modules_to_save.default")
            found[name.removesuffix(".base_layer")] = layer.weight.numel()
    return found


@functools.cache
def plan_of(family, kind):
    """Return the plan of a model that is found, or written where finding takes longer than the test."""
    if (family, kind) in PLANS:
        return PLANS[family, kind]
    model = plain(family) if kind == "plain" else adapted(family, kind)
    return ts.plans.auto(model, inputs(family), verbose=False)


def trains(family, kind, plan):
    model = adapted(family, kind).eval()
    train((model, ts.parallelize(copy.deepcopy(model), plan)), inputs(family))


def each_once():
    """Each kind of adapters once in the slow part; the others of the product are nightly."""
    for family, kind in itertools.product(FAMILIES, KINDS):
        is_slow = (family, kind) in {*PLANS, ("llama", "ia3")}
        yield pytest.param(family, kind, marks=pytest.mark.slow if is_slow else pytest.mark.nightly)


@pytest.mark.parametrize(("family", "kind"), list(each_once()))
def test_an_adapted_model_trains_like_one_device(on_ranks, family, kind):
    plan = plan_of(family, kind)
    on_ranks(2, lambda: trains(family, kind, plan))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [case for case in each_once() if case.values not in PLANS])
def test_a_plan_splits_what_it_splits_without_adapters(family, kind):
    without = split_weights(plain(family), plan_of(family, "plain"))
    found = split_weights(adapted(family, kind), plan_of(family, kind))
    assert sum(without[n] for n in without if n in found) >= 0.95 * sum(without.values())


# -- Adapters that are switched, merged, disabled and dropped -------------------------------------


def switches(kind):
    batch = inputs("llama")
    model = adapted("llama", kind)
    model.add_adapter("other", configuration("llama", kind))
    draw_adapters(model)
    whole, split = whole_and_split(model.eval())
    equal(split, whole, batch)
    train((whole, split), batch, steps=1)
    for each in (whole, split):
        each.set_adapter("other")
    equal(split, whole, batch)
    train((whole, split), batch, steps=1)
    with whole.disable_adapter(), split.disable_adapter():
        equal(split, whole, batch)
    for each in (whole, split):
        each.merge_adapter()
    equal(split, whole, batch)
    for each in (whole, split):
        each.unmerge_adapter()
    equal(split, whole, batch)
    merged = [each.merge_and_unload() for each in (whole, split)]
    equal(merged[1], merged[0], batch)
    assert any(isinstance(m, ts.nn.ParallelLinear) for m in merged[1].modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENT)
def test_adapters_are_switched_merged_and_disabled_like_on_one_device(on_ranks, kind):
    on_ranks(2, lambda: switches(kind))


def mixes():
    """Compute a batch of which each row has its own adapters, or none."""
    model = adapted("llama", "lora", modules_to_save=["lm_head"])
    for name in ("other", "third"):
        model.add_adapter(name, configuration("llama", "lora", r=2, modules_to_save=["lm_head"]))
    draw_adapters(model)
    whole = model.eval()
    copies = ["original_module", *(f"modules_to_save.{name}" for name in ("default", "other", "third"))]
    heads = {f"**.lm_head.{name}": ts.Vocab(gather_output=True) for name in copies}
    split = ts.parallelize(copy.deepcopy(whole), LLAMA | heads)
    batch = inputs("llama")
    batch["input_ids"] = torch.cat([batch["input_ids"]] * 2)
    del batch["labels"]
    names = ["third", "default", "__base__", "other", "default", "third"]
    with torch.no_grad():
        expected, got = (each(**batch, adapter_names=names).logits for each in (whole, split))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_of_a_batch_have_adapters_of_their_own(on_ranks):
    on_ranks(2, mixes)


def drops(family, kind, plan):
    """Train with dropout, and compare what all ranks hold, and what the adapters dropped."""
    batch = inputs(family)
    split = ts.parallelize(adapted(family, kind, lora_dropout=0.5), plan).train()
    dropouts = [m for n, m in split.named_modules() if "lora_dropout" in n and isinstance(m, nn.Dropout)]
    masks = {}

    def keep(module, _args, output):
        masks.setdefault(module, []).append(output.detach() == 0)

    for module in dropouts:
        module.register_forward_hook(keep)
    optimizer = torch.optim.SGD([p for p in split.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(3)
    for _ in range(3):
        split(**batch).loss.backward()
        ts.check_gradients(split)
        optimizer.step()
        optimizer.zero_grad()
    cut = cut_tensors(split)
    held = [v.detach() for n, v in split.state_dict().items() if n not in cut]
    held = torch.cat([v.float().reshape(-1) for v in [*held, torch.rand(4)]])
    everyones = ts.distributed.gather(held.unsqueeze(0), 0)
    names = {m: n for n, m in split.named_modules()}
    return (everyones - everyones[:1]).abs().max().item(), {names[m]: drawn for m, drawn in masks.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) in PLANS else pytest.mark.nightly)
        for family in ("llama", "gpt2", "bert", "t5")
        for kind in ("lora", "dora")
    ],
)
def test_dropout_of_adapters_is_drawn_alike_before_columns_and_apart_before_rows(on_ranks, family, kind):
    plan = LLAMA if family == "llama" else plan_of(family, kind)
    (first, mine), (second, others) = on_ranks(2, lambda: drops(family, kind, plan))
    assert first == second == 0
    alike = {
        n: all(map(torch.equal, mine[n], others[n])) for n in mine if mine[n][0].shape == others[n][0].shape
    }
    whole = {n for n in mine if mine[n][0].size(-1) == 32 and "o_proj" not in n}
    if family == "llama":
        assert {n for n, same in alike.items() if same} == whole
    assert any(alike.values())
    assert not all(alike.values())


# -- Plans and proofs -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_of_transformers_fits_a_wrapped_and_a_loaded_model(tmp_path):
    import peft

    without = ts.plans.from_hf(plain("llama"), verbose=False)
    model = adapted("llama", "lora")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain("llama"), tmp_path, is_trainable=True)
    for each in (model, loaded):
        wrapped = ts.plans.from_hf(each, verbose=False)
        assert wrapped == {f"base_model.model.{path}": style for path, style in without.items()}
    inside = plain("llama")  # as transformers puts adapters into its own model
    inside.load_adapter(tmp_path)
    assert ts.plans.from_hf(inside, verbose=False) == without


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROVEN)
def test_a_plan_of_ones_own_is_proven_for_an_adapted_model(kind):
    model, batch = adapted("llama", kind, **({} if kind == "ia3" else {"lora_dropout": 0.1})), inputs("llama")
    ts.verify(model, LLAMA, batch).assert_ok()
    assert not ts.verify(model, LLAMA | {"**.gate_proj": ts.Column(sections=2)}, batch).ok


@pytest.mark.slow
def test_dropout_of_adapters_that_ranks_draw_apart_is_no_proof(monkeypatch):
    monkeypatch.setattr(SplitDraws, "_is_replicated", lambda *_: False)
    report = ts.verify(adapted("llama", "lora", lora_dropout=0.1), LLAMA, inputs("llama"))
    assert "with dropout" in str(report.fault)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_trained_biases_of_a_key_head_that_ranks_share_are_right(kind):
    keys = ts.Column(heads=4, kv_heads=1, holds="kv")
    plan = LLAMA | {"**.q_proj": ts.Column(heads=4, kv_heads=1), "**.k_proj": keys, "**.v_proj": keys}
    plan |= {"**.o_proj": ts.Row(heads=4, kv_heads=1)}
    model = adapted("llama-one-key-head", kind, bias="all", lora_dropout=0.1)
    ts.verify(model, plan, inputs("llama")).assert_ok()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DIFFERENT)
def test_joined_outputs_of_adapted_layers_are_right(kind):
    joined = {"**.k_proj": ts.Column(gather_output=True), "**.v_proj": ts.Column(gather_output=True)}
    ts.verify(adapted("llama", kind), joined, inputs("llama")).assert_ok()


PARTS = {
    **LLAMA,
    "**.layers": ts.Sequence(),
    "**.input_layernorm": ts.Sequence(),
    "**.post_attention_layernorm": ts.Sequence(),
    "**.self_attn": ts.Gathered(),
}
"""Attentions gather the sequence once, and each column layer of an MLP gathers it again."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROVEN)
def test_adapters_on_parts_of_a_sequence_are_right(kind):
    options = {} if kind == "ia3" else {"lora_dropout": 0.1}
    options |= {"bias": "all"} if kind in ("lora", "dora") else {}
    model = adapted("llama-one-key-head", kind, **options)
    keys = ts.Column(heads=4, kv_heads=1, holds="kv")
    plan = {"**.q_proj": ts.Column(heads=4, kv_heads=1), "**.k_proj": keys, "**.v_proj": keys}
    plan |= {"**.o_proj": ts.Row(heads=4, kv_heads=1)}
    ts.verify(model, PARTS | plan, inputs("llama")).assert_ok()


@pytest.mark.slow
def test_adapters_train_on_parts_of_a_sequence_like_one_device(on_ranks):
    on_ranks(2, lambda: trains("llama", "lora", PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.nightly)])
def test_a_plan_with_parts_of_sequences_is_found_for_an_adapted_model(family):
    plan = ts.plans.auto(adapted(family, "dora"), inputs(family), sequence=True, verbose=False)
    assert any(isinstance(style, ts.Gathered) for style in plan.values())


def saves_modules():
    batch = inputs("llama")
    model = adapted("llama", "lora", modules_to_save=["lm_head"])
    whole = model.eval()
    split = ts.parallelize(copy.deepcopy(whole), ts.plans.auto(whole, batch, verbose=False))
    heads = [n for n in cut_tensors(split) if "lm_head" in n]
    train((whole, split), batch)
    with whole.disable_adapter(), split.disable_adapter():
        equal(split, whole, batch)
    return heads


@pytest.mark.slow
def test_all_copies_of_a_module_that_is_trained_whole_are_split(on_ranks):
    copies = ["modules_to_save.default", "original_module"]
    for found in on_ranks(2, saves_modules):
        assert sorted(found) == [f"base_model.model.lm_head.{name}.weight" for name in copies]


@pytest.mark.slow
def test_a_plan_says_which_adapted_layer_stays_whole_and_why(capsys):
    import peft

    warnings.simplefilter("ignore")
    options = {"r": 4, "target_modules": ["up_proj", "down_proj"], "init_lora_weights": "mica"}
    model = peft.get_peft_model(plain("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    plan = ts.plans.auto(model, inputs("llama"))
    assert not any("up_proj" in path or "down_proj" in path for path in plan)
    said = capsys.readouterr().out
    assert "up_proj: whole" in said
    assert "computes more than LoRA, DoRA or IA3 (MiCALinearVariant)" in said


@pytest.mark.slow
def test_another_kind_of_adapter_is_refused_by_name():
    import peft

    warnings.simplefilter("ignore")
    model = peft.get_peft_model(plain("llama"), peft.LoHaConfig(r=4, target_modules=["up_proj"]))
    with pytest.raises(ModelError, match=r"mlp.up_proj cannot be split: its adapter \(peft.tuners.loha"):
        ts.parallelize(model, LLAMA)


# -- What is saved, and what is refused -----------------------------------------------------------


def writes_adapter(folder):
    import peft

    batch = inputs("llama")
    whole, split = whole_and_split(adapted("llama", "dora").eval())
    state = ts.collect_state_dict(split, split.state_dict(), to="rank0")
    with pytest.raises(StateError, match="would write this rank's shards"):
        split.save_pretrained(folder)
    if not state:  # of all ranks but the first, which alone writes the folder
        return
    split.save_pretrained(folder, state_dict=state)
    read = peft.PeftModel.from_pretrained(plain("llama"), folder).eval()
    equal(read, whole, batch)


@pytest.mark.slow
def test_peft_reads_the_adapter_of_a_split_model(on_ranks, tmp_path):
    on_ranks(2, lambda: writes_adapter(tmp_path))


def communicates():
    model = adapted("llama", "lora").eval()
    split = ts.parallelize(model, LLAMA)
    loss = split(**inputs("llama")).loss
    shapes = []
    original = torch.distributed.all_reduce
    try:
        torch.distributed.all_reduce = lambda t, *a, **k: (
            shapes.append(tuple(t.shape)),
            original(t, *a, **k),
        )[1]
        loss.backward()
    finally:
        torch.distributed.all_reduce = original
    assert all((p.grad is not None) == ("lora_" in name) for name, p in split.named_parameters())
    return shapes


@pytest.mark.slow
def test_a_frozen_base_has_no_gradients_to_communicate(on_ranks):
    for shapes in on_ranks(2, communicates):
        assert shapes
        assert {shape[:2] for shape in shapes} == {(3, 7)}  # those of activations alone


def refuses():
    split = ts.parallelize(adapted("llama", "lora"), {"**.up_proj": ts.Column(), "**.down_proj": ts.Row()})
    with pytest.raises(ModelError, match="split already, and would be whole"):
        split.add_adapter("late", configuration("llama", "lora"))
    model = adapted("llama", "dora")
    model.merge_adapter()
    with pytest.raises(ModelError, match="its DoRA adapter is merged into its weight"):
        ts.parallelize(model, {"**.up_proj": ts.Column(), "**.down_proj": ts.Row()})
    model.unmerge_adapter()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A["default"] = nn.Sequential(nn.Linear(32, 4))
    with pytest.raises(ModelError, match="has a Sequential where LoRA has a linear layer"):
        ts.parallelize(model, {"**.up_proj": ts.Column(), "**.down_proj": ts.Row()})


@pytest.mark.slow
def test_what_adapters_cannot_do_in_a_split_model_is_refused(on_ranks):
    on_ranks(2, refuses)
