"""Adapters of peft in files: written by every backend, and loaded by peft and by every backend."""

import json
from functools import cache, partial
from importlib.util import find_spec

import pytest
import torch
import tp_shard as ts
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError, StateError
from tp_core.state import open_tensors
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft's own question
]

TOKENS = 48
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "lora": ("LoraConfig", {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "dora": (
        "LoraConfig",
        {"r": 2, "lora_alpha": 3, "use_rslora": True, "use_dora": True, "target_modules": LINEAR},
    ),
    "ia3": ("IA3Config", {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "saved": ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"]}),
}
ALONE = [("single", kind) for kind in KINDS] + [("tuple", "saved"), ("dp-gather", "saved")]


def make_base():
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config).double()


def make(kind, *, adapters=("default",), **changes):
    import peft

    name, settings = KINDS[kind]
    model = None
    for adapter in adapters:
        torch.manual_seed(len(adapter))
        config = getattr(peft, name)(**settings | changes)
        if model is None:
            model = peft.get_peft_model(make_base(), config, adapter_name=adapter)
        else:
            model.add_adapter(adapter, config)
    return model.double()


def logits(model):
    ids = torch.arange(24).view(3, 8) % TOKENS
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def step(model, batch):
    return model(input_ids=batch[0], labels=batch[0]).loss


@cache
def plan_of(kind):
    return ts.plans.auto(make(kind), verbose=False)


def split(model, plan):
    if plan is None:
        return model
    if not torch.distributed.is_initialized():
        ts.distributed.init_process_group()
    return ts.parallelize(model, plan)


def train(kind, backend, folder, *, adapters=("default",), devices="cpu", epochs=1, plan=None):
    model = split(make(kind, adapters=adapters), plan)
    ids = torch.randint(TOKENS, (8, 6), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with Trainer(seed=0, progress=False, devices=devices, backend=backend) as trainer:
        trainer.fit(
            model,
            optimizer,
            DataLoader(TensorDataset(ids), batch_size=4),
            step=step,
            epochs=epochs,
            checkpoint=Checkpoints(folder / "run", weights="trainable"),
            resume="auto",
        )
        trainer.export(model, folder / "adapter", adapter=True)
        trainer.export(model, folder / "merged.safetensors", merged=True)
        fresh = split(make(kind, adapters=adapters), plan)
        trainer.load_model(fresh, folder / "adapter")
        state = trainer.session.model_state(model)
        loaded = trainer.session.model_state(fresh)
        # The base is in no checkpoint: no backend writes frozen weights in its steps.
        stored = open_tensors(max((folder / "run").glob("step-*"))).infos
        assert not [n for n in stored if n.startswith("model.") and not any(a in n for a in adapters)]
        other = make(kind, **({"feedforward_modules": ["v_proj"]} if kind == "ia3" else {"r": 4}))
        with pytest.raises(StateError, match=r"does not fit the model's 'default': it has (r=2|base.*shape)"):
            trainer.load_model(other, folder / "adapter")
        return {n: t.clone() for n, t in state.items()}, {n: t.clone() for n, t in loaded.items()}


def check(kind, folder, found, *, adapters=("default",)):
    import peft
    from safetensors.torch import load_file

    state, loaded = found
    model = make(kind, adapters=adapters)
    model.load_state_dict(state)
    expected = logits(model)
    assert not torch.equal(expected, logits(make_base()))
    for adapter in adapters:
        place = folder / "adapter" if adapter == "default" else folder / "adapter" / adapter
        again = peft.PeftModel.from_pretrained(make_base(), place).double()
        model.set_adapter(adapter)
        assert torch.equal(logits(again), logits(model))
        assert json.loads((place / "adapter_config.json").read_text())["inference_mode"]
    model.set_adapter("default")
    merged = make_base()
    merged.load_state_dict(load_file(folder / "merged.safetensors"))
    torch.testing.assert_close(logits(merged), expected, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(loaded[n], state[n]) for n in state if "default" in n)


@pytest.mark.parametrize(("backend", "kind"), ALONE)
def test_peft_loads_what_one_process_writes(tmp_path, backend, kind):
    devices = "cpu" if backend == "single" else ["cpu", "cpu"]
    check(kind, tmp_path, train(kind, backend, tmp_path, devices=devices))


def train_all(kinds, backend, folder, plans):
    return {kind: train(kind, backend, folder / kind, plan=plans.get(kind)) for kind in kinds}


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("fsdp", ["lora", "ia3"]),
        ("shard", ["dora", "saved"]),
        *(pytest.param(name, list(KINDS), marks=pytest.mark.nightly) for name in ("ddp", "fsdp", "shard")),
    ],
)
def test_peft_loads_what_two_ranks_write(two_ranks, tmp_path, backend, kinds):
    for kind in kinds:
        (tmp_path / kind).mkdir()
    plans = {kind: plan_of(kind) for kind in kinds} if backend == "shard" else {}
    for found in two_ranks.run(partial(train_all, kinds, backend, tmp_path, plans)):
        for kind in kinds:
            check(kind, tmp_path / kind, found[kind])


def test_several_adapters_are_written_beside_each_other(tmp_path):
    names = ("default", "other")
    check("lora", tmp_path, train("lora", "single", tmp_path, adapters=names), adapters=names)
    assert (tmp_path / "adapter" / "other" / "adapter_model.safetensors").is_file()


def test_models_and_files_that_do_not_go_together_are_refused(tmp_path):
    trainer = Trainer(progress=False, devices="cpu")
    for name, words in (("none", {"adapter": True}), ("none.safetensors", {"merged": True})):
        with pytest.raises(ConfigError, match=r"needs one model with adapters.*Linear has none"):
            trainer.export(torch.nn.Linear(2, 2), tmp_path / name, **words)
    model = make("lora")
    with pytest.raises(ConfigError, match="takes adapter=True or merged=True"):
        trainer.export(model, tmp_path / "both", adapter=True, merged=True)
    trainer.export(model, tmp_path / "lora", adapter=True)
    with pytest.raises(StateError, match="it has lora_alpha=8, and the model's has lora_alpha=32"):
        trainer.load_model(make("lora", lora_alpha=32), tmp_path / "lora")
    with pytest.raises(StateError, match="it has peft_type='LORA', and the model's has peft_type='IA3'"):
        trainer.load_model(make("ia3"), tmp_path / "lora")
    with pytest.raises(StateError, match=r"does not fit the model's 'default': it lacks .*lm_head"):
        trainer.load_model(make("lora", modules_to_save=["lm_head"]), tmp_path / "lora")
    with pytest.raises(ConfigError, match="the model has no adapter 'other'; it has default"):
        trainer.load_model(model, tmp_path / "lora", name="other")


def test_a_run_goes_from_backend_to_backend_without_its_base(tmp_path):
    train("saved", "single", tmp_path)
    for epochs, backend in ((2, "shard"), (3, "fsdp")):
        plan = plan_of("saved") if backend == "shard" else None
        run_ranks(partial(train, epochs=epochs, plan=plan), 2, "saved", backend, tmp_path, timeout_s=300)
    found, _ = train("saved", "single", tmp_path, epochs=4)
    expected, _ = train("saved", "single", tmp_path / "undisturbed", epochs=4)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-7, atol=1e-10)
