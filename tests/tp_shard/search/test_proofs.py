"""Plans that one small batch would prove, and that are wrong elsewhere, are not proposed."""

import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from tp_core.errors import ConfigError


class Block(nn.Module):
    def __init__(self, layer_idx, activation=F.relu):
        super().__init__()
        self.layer_idx, self.activation = layer_idx, activation
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


class Rolling(Block):
    def forward(self, x):
        hidden = self.activation(self.up(x))
        return x + self.down(hidden.roll(1, -1) if self.layer_idx % 2 else hidden)


class Alibi(nn.Module):
    """Attention that counts its heads itself, and biases each of them otherwise."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.table = nn.Embedding(50, 16)

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        slopes = torch.tensor([2.0 ** -(8 * (i + 1) / self.num_heads) for i in range(self.num_heads)])
        places = torch.arange(ids.size(1))
        bias = -(places[:, None] - places).abs() * slopes[:, None, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(x.dtype))
        return x + self.o(mixed.transpose(1, 2).flatten(-2))


class Observer(nn.Module):
    """Keeps the largest value that it met in training, and clamps by it in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1e9))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.largest.copy_(x.abs().max() / 2)
            return x
        return x.clamp(-self.largest, self.largest)


def test_blocks_that_look_alike_are_tried_as_they_are():
    x = torch.randn(3, 8, dtype=torch.float64)
    for blocks in ([Rolling(0), Rolling(1)], [Block(0), Block(1, lambda hidden: hidden.softmax(-1))]):
        model = nn.Sequential(*blocks).double()
        try:
            plan = ts.plans.auto(model, x, verbose=False)
        except ConfigError:
            continue  # nothing is split, which is right
        assert ts.verify(model, plan, x).ok


@pytest.mark.parametrize("shape", [(2, 7), (1, 1)])
def test_a_batch_of_one_token_proves_nothing_of_others(shape):
    torch.manual_seed(0)
    model = Alibi().double()
    plan = ts.plans.auto(model, torch.zeros(shape, dtype=torch.long), verbose=False)
    assert ts.verify(model, plan, torch.randint(0, 50, (2, 7))).ok


def test_buffers_that_training_writes_are_those_of_the_whole_model():
    model = nn.Sequential(nn.Linear(8, 16), Observer(), nn.Linear(16, 8)).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="keeps numbers of what it gets"):
        ts.plans.auto(model, x, verbose=False)
    assert not ts.verify(model, {"0": ts.Column(), "2": ts.Row()}, x).ok


def test_a_users_batch_is_tried_without_the_cache():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 96, (2, 7))
    plan = ts.plans.auto(model, {"input_ids": ids, "labels": ids}, verbose=False)
    assert any(name.endswith("q_proj") for name in plan)
    assert plan.keys() == ts.plans.auto(model, verbose=False).keys()
    assert ts.plans.from_hf(model, {"input_ids": ids, "labels": ids}, verbose=False)
    assert model.config.use_cache
