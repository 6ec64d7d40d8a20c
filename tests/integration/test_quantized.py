"""Adapters over a base that torchao or bitsandbytes has quantized, where these are installed."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ModelError, StateError
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Trainer

from tests.reference_training import train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their own words about what is built
LIBRARIES = {"int8": "torchao", "intx": "torchao", "nf4": "bitsandbytes", "bnb-int8": "bitsandbytes"}


class Adapted(nn.Module):
    """A quantized layer with an adapter beside it."""

    def __init__(self, kind, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        base = nn.Sequential(nn.Linear(64, 64, bias=False)).to(dtype)
        self.base = quantized(kind, base, dtype).requires_grad_(False)
        torch.manual_seed(1)
        self.down = nn.Linear(64, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, 64, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_peft(kind, dtype, seed=0):
    """Return the same with peft's own adapter."""
    peft = pytest.importorskip("peft")
    base = Adapted(kind, dtype, seed).base
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = kind == "nf4", kind == "bnb-int8"
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["0"], "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(**options))


def trained(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def quantized(kind, model, dtype):
    if LIBRARIES[kind] == "torchao":
        from torchao import quantization

        config = quantization.Int8WeightOnlyConfig()
        if kind == "intx":
            config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)
        quantization.quantize_(model, config)
        return model
    import bitsandbytes as bnb

    weight = model[0].weight.detach()
    if kind == "nf4":
        layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=dtype, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return nn.Sequential(layer.to("cpu"))


def step(model, batch):
    return (model(batch[0]) - batch[0]).square().mean()


def fit(kind, dtype, folder=None, *, make=Adapted, epochs=1, seed=0, backend="single", devices="cpu"):
    model = make(kind, dtype, seed)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    with Trainer(seed=0, progress=False, devices=devices, backend=backend) as trainer:
        trainer.fit(
            model,
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01),
            DataLoader(TensorDataset(x), batch_size=8),
            step=step,
            epochs=epochs,
            checkpoint=None if folder is None else Checkpoints(folder, weights="trainable"),
            resume=None if folder is None else "auto",
        )
    return trained(model)


def by_hand(kind, dtype, epochs, make=Adapted):
    model = make(kind, dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    train(model, optimizer, [(part,) for part in x.split(8)] * epochs, step)
    return trained(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", LIBRARIES)
def test_adapters_over_a_quantized_base_are_trained_as_by_hand_and_resumed(tmp_path, kind, dtype):
    pytest.importorskip(LIBRARIES[kind])
    fit(kind, dtype, tmp_path)
    assert torch.equal(fit(kind, dtype, tmp_path, epochs=3), by_hand(kind, dtype, 3))
    stored = torch.load(max(Path(tmp_path).glob("step-*")) / "tensors.pt", weights_only=True)
    assert not [name for name in stored if name.startswith("model.base.0.weight")]
    with pytest.raises(StateError, match=r"differs is 'base.0.weight"):
        fit(kind, dtype, tmp_path, epochs=4, seed=1)


@pytest.mark.parametrize("make", [Adapted, with_peft])
@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
@pytest.mark.parametrize("kind", LIBRARIES)
def test_two_devices_train_over_a_quantized_base_as_one_does(tmp_path, kind, backend, make):
    pytest.importorskip(LIBRARIES[kind])
    two = {"backend": backend, "devices": ["cpu", "cpu"], "make": make}
    fit(kind, torch.float32, tmp_path, **two)
    found = fit(kind, torch.float32, tmp_path, epochs=2, **two)
    torch.testing.assert_close(found, by_hand(kind, torch.float32, 2, make), rtol=1e-4, atol=1e-6)


def on_two_ranks(kind):
    found = fit(kind, torch.float32, epochs=2, backend="ddp")
    with pytest.raises(ModelError, match=r"'base.0.weight' is quantized .* fully_shard cannot cut"):
        fit(kind, torch.float32, backend="fsdp")
    return found


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_two_ranks_train_over_a_quantized_base_as_one_does(kind):
    pytest.importorskip(LIBRARIES[kind])
    expected = by_hand(kind, torch.float32, 2)
    for found in run_ranks(on_two_ranks, 2, kind):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def on_other_bases(kind):
    with Trainer(backend="ddp", devices="cpu") as trainer, pytest.raises(ModelError) as caught:
        trainer.prepare(Adapted(kind, torch.float32, trainer.rank))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["nf4", "bnb-int8"])
def test_bases_of_ranks_that_differ_are_refused_where_scales_are_not_shared(kind):
    pytest.importorskip(LIBRARIES[kind])
    for message in run_ranks(on_other_bases, 2, kind):
        assert "ranks have quantized the model's base from other weights: 'base.0." in message
