"""Models that others wrote train on shards as on one device, and go on there and under ddp."""

import functools
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Checkpoints, Trainer

pytestmark = pytest.mark.slow

VOCABULARY = 40


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **dropout))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**decoder_sizes()))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **decoder_sizes(), num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    return MixtralForCausalLM(config)


def decoder_sizes():
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }


class Residual(nn.Module):
    """(batch, wide, height, width) -> the same, with batch norms."""

    def __init__(self, wide):
        super().__init__()
        self.first, self.second = nn.Conv2d(wide, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)

    def forward(self, x):
        return torch.relu(x + self.last(self.second(torch.relu(self.norm(self.first(x))))))


def resnet():
    stages = [nn.Sequential(Residual(4), Residual(4)), nn.Sequential(nn.Conv2d(4, 8, 1), Residual(8))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, VOCABULARY)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), *stages, *head)


class Timed(nn.Module):
    """A block of a diffusion model: a residual one that is told the time."""

    def __init__(self, into, out):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, into), nn.Conv2d(into, out, 3, padding=1)
        self.time, self.skip = nn.Linear(4, out), nn.Conv2d(into, out, 1)

    def forward(self, x, time):
        return self.skip(x) + self.conv(nn.functional.silu(self.norm(x))) + self.time(time)[..., None, None]


class UNet(nn.Module):
    """(batch, 3, height, width), (batch, 4) -> (batch, 3, height, width)."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.down = nn.ModuleList([Timed(4, 8), Timed(8, 16)])
        self.middle = Timed(16, 16)
        self.up = nn.ModuleList([Timed(32, 8), Timed(16, 4)])

    def forward(self, x, time):
        x, seen = self.into(x), []
        for block in self.down:
            x = block(x, time)
            seen.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, seen.pop()], 1), time)
        return self.out(x)


def word_loss(model, batch, **more):
    logits = model(input_ids=batch["words"], **more).logits  # the library's own loss is of single precision
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["words"].flatten())


def translation_loss(model, batch):
    return word_loss(model, batch, decoder_input_ids=batch["words"].roll(1, dims=-1))


def class_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["picture"]), batch["words"][:, 0])


def noise_loss(model, batch):
    noise = batch["picture"].roll(1, dims=-1)
    return (model(batch["picture"] + noise, batch["time"]) - noise).square().mean()


FAMILIES = {
    "GPT-2": (gpt2, word_loss),
    "BERT": (bert, word_loss),
    "T5": (t5, translation_loss),
    "Llama": (llama, word_loss),
    "Mixtral": (mixtral, word_loss),
    "ResNet": (resnet, class_loss),
    "UNet": (UNet, noise_loss),
}


class Samples(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {
            "words": torch.randint(VOCABULARY, (8,), generator=generator),
            "picture": torch.randn(3, 8, 8, generator=generator).double(),
            "time": torch.randn(4, generator=generator).double(),
        }


def train(family, backend, folder=None, *, epochs=2):
    """Return the losses of the epochs, and the whole model."""
    make, step = FAMILIES[family]
    torch.manual_seed(1)
    model = make().double()
    with Trainer(backend=backend, devices="cpu", seed=2, progress=False) as trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        kept = {} if folder is None else {"checkpoint": Checkpoints(folder), "resume": "auto"}
        loader = DataLoader(Samples(), batch_size=4, shuffle=True)
        history = trainer.fit(model, optimizer, loader, step=step, epochs=epochs, clip_norm=1.0, **kept)
        return [r.train["loss"] for r in history], trainer.session.model_state(model)


def assert_same(found, expected):
    losses, state = found
    assert losses == pytest.approx(expected[0], rel=1e-8)
    assert state.keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in ("Llama", "ResNet") else pytest.mark.nightly) for f in FAMILIES],
)
def test_shards_train_as_one_device_and_any_backend_goes_on(two_ranks, tmp_path, family):
    # Batch norms know the samples of their own rank: shards are then what ddp is.
    is_apart = family == "ResNet"
    expected = two_ranks.run(train, family, "ddp")[0] if is_apart else train(family, "single")
    assert_same(two_ranks.run(train, family, "fsdp")[0], expected)
    two_ranks.run(functools.partial(train, epochs=1), family, "fsdp", tmp_path / "shards")
    shutil.copytree(tmp_path / "shards", tmp_path / "ddp")
    assert_same(two_ranks.run(train, family, "ddp", tmp_path / "ddp")[0], expected)
    found = train(family, "single", tmp_path / "shards")
    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-8)
    if not is_apart:
        assert_same(found, expected)
