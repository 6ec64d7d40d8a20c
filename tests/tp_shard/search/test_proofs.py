"""Plans that one small batch would prove, and that are wrong elsewhere, are not proposed."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tp_shard as ts
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from tp_core.errors import ConfigError, ModelError

from tests.cases import first_fast


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


@pytest.mark.slow
def test_blocks_that_look_alike_are_tried_as_they_are():
    x = torch.randn(3, 8, dtype=torch.float64)
    for blocks in ([Rolling(0), Rolling(1)], [Block(0), Block(1, lambda hidden: hidden.softmax(-1))]):
        model = nn.Sequential(*blocks).double()
        try:
            plan = ts.plans.auto(model, x, verbose=False)
        except ConfigError:
            continue  # nothing is split, which is right
        assert ts.verify(model, plan, x).ok


@pytest.mark.parametrize("shape", [pytest.param((2, 7), marks=pytest.mark.slow), (1, 1)])
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


@pytest.mark.slow
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


class Detector(nn.Module):
    """Attends to an image, as detectors do, with queries that are zero and have positions from a table."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.places = 4, nn.Embedding(5, 16)
        self.convs = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(6)))
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.seen, self.out = nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, image):
        places = self.places.weight.expand(image.size(0), -1, -1)
        queries = self.attend(torch.zeros_like(places), torch.zeros_like(places), places)
        seen = self.seen(self.convs(image).flatten(2).transpose(1, 2))
        return self.out(self.attend(queries, seen, places))

    def attend(self, x, seen, places):
        q, k, v = self.q(x + places), self.k(seen + places if seen is x else seen), self.v(seen)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Sinusoids(nn.Embedding):
    """Positions, which take the shape of the tokens."""

    def forward(self, shape):
        return super().forward(torch.arange(shape[1]))


class Masked(nn.Module):
    """Masks places in training by numbers of numpy and of Python."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), Sinusoids(64, 8)
        self.blocks = nn.Sequential(Block(0), Block(1))

    def forward(self, ids):
        x = self.tokens(ids) + self.places(ids.shape)
        if self.training:
            keep = [[np.random.rand() > 0.5 for _ in range(ids.size(1))] for _ in range(ids.size(0))]
            x = x * torch.tensor(keep)[..., None] * random.random()
        return self.blocks(x)


@pytest.mark.slow
def test_zero_queries_with_positions_of_a_table_are_split():
    torch.manual_seed(0)
    model, images = Detector().double(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    plan = ts.plans.auto(model, images, verbose=False)
    assert {"q", "k", "v", "o"} <= plan.keys()
    assert "places" not in plan  # its weight is read past its forward
    ts.verify(model, plan, images).assert_ok()


class Biased(nn.Module):
    """Attends with a bias for each head that a module beside the attention makes."""

    def __init__(self):
        super().__init__()
        self.bias, self.attention = Bias(), Attention()

    def forward(self, x):
        return x + self.attention(x, bias=self.bias(x))


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, 1, 64))

    def forward(self, x):
        return self.table[..., : x.size(1)].expand(1, 4, x.size(1), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, bias):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2))


class Tied(nn.Module):
    """Holds its table in two places, of which one is called, as encoder-decoders of transformers do."""

    def __init__(self):
        super().__init__()
        self.shared, self.tokens = nn.Embedding(50, 8), nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.tokens.weight = self.head.weight = self.shared.weight

    def forward(self, ids):
        return self.head(self.tokens(ids))


@pytest.mark.slow
def test_a_bias_that_is_made_outside_an_attention_leaves_it_split():
    torch.manual_seed(0)
    model, x = Biased().double(), torch.randn(2, 7, 16, dtype=torch.float64)
    plan = ts.plans.auto(model, x, verbose=False)
    assert plan["attention"].inputs == ("bias",)
    assert {"attention.q", "attention.o"} <= plan.keys()
    ts.verify(model, plan, x).assert_ok()


def test_a_table_that_is_called_under_another_name_is_split():
    plan = ts.plans.auto(Tied(), torch.randint(0, 50, (2, 7)), verbose=False)
    assert plan.keys() == {"shared", "tokens", "head"}


@pytest.mark.slow
def test_numbers_of_numpy_and_python_are_each_ranks_own():
    model, ids = Masked().double(), torch.randint(0, 50, (2, 7))
    before = np.random.get_state()[1].tolist(), random.getstate()
    plan = ts.plans.auto(model, ids, verbose=False)
    assert {"blocks.0.up", "blocks.1.down"} <= plan.keys()
    ts.verify(model, plan, ids).assert_ok()
    assert before == (np.random.get_state()[1].tolist(), random.getstate())


def test_a_block_that_is_wrong_leaves_the_others_split():
    x = torch.randn(3, 8, dtype=torch.float64)
    model = nn.Sequential(Rolling(0), Rolling(1)).double()
    assert ts.plans.auto(model, x, verbose=False).keys() == {"0.up", "0.down"}


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


TRANSFORMS = {
    "WeightNorm": parametrizations.weight_norm,
    "SpectralNorm": parametrizations.spectral_norm,
    "Orthogonal": parametrizations.orthogonal,
    "WeightNorm, older": weight_norm,
    "SpectralNorm, older": spectral_norm,
    "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "RandomUnstructured": lambda layer: prune.random_unstructured(layer, "bias", 0.5),
    "Twice": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
}


@pytest.mark.parametrize("name", first_fast(TRANSFORMS, 2))
def test_layers_that_compute_their_weight_stay_whole(name):
    x = torch.randn(3, 8, dtype=torch.float64)
    model = nn.Sequential(Block(0), Block(1)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the older functions
        TRANSFORMS[name](model[0].up)
    words = f"0.up cannot be split: its (weight|bias) is .* computed, by {name.partition(',')[0]}"
    assert ts.plans.auto(model, x, verbose=False).keys() == {"1.up", "1.down"}
    for use in (ts.parallelize, lambda model, plan: ts.verify(model, plan, x)):
        with pytest.raises(ModelError, match=words):
            use(model, {"0.up": ts.Column(), "0.down": ts.Row()})


def test_layers_without_weights_yet_are_named():
    model, x = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(3, 8)
    plan = {"0": ts.Column(), "2": ts.Row()}
    for use in (
        lambda: ts.plans.auto(model, x),
        lambda: ts.verify(model, plan, x),
        lambda: ts.parallelize(model, plan),
    ):
        with pytest.raises(ModelError, match=r"before .* has seen an input; call the model with"):
            use()


class Configured(Block):
    def __init__(self, layer_idx, roll):
        super().__init__(layer_idx)
        self.config = SimpleNamespace(roll=roll)

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)).roll(self.config.roll, -1))


@pytest.mark.slow
def test_where_memory_is_short_blocks_that_do_the_same_are_tried_as_one(monkeypatch, capsys):
    monkeypatch.setattr("tp_shard._search._prove._memory", lambda: 0)  # no model is as large in a test
    x = torch.randn(3, 8, dtype=torch.float64)
    centered = nn.Sequential(Block(0), Block(1))
    centered[1].up.register_forward_hook(lambda _m, _x, made: made - made.mean(-1, keepdim=True))
    for model in (nn.Sequential(Configured(0, 0), Configured(1, 1)), centered):
        assert ts.plans.auto(model.double(), x).keys() == {"0.up", "0.down"}
        assert "as one" not in capsys.readouterr().out
    same = nn.Sequential(Configured(0, 0), Configured(1, 0)).double()
    assert ts.plans.auto(same, x).keys() == {"0.up", "0.down", "1.up", "1.down"}
    assert "equal blocks were tried as one, because memory is short" in capsys.readouterr().out


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.usual, self.other = Block(0), Rolling(1)

    def forward(self, x, other=False):
        return self.other(x) if other else self.usual(x)


def test_a_report_says_what_was_proven_and_what_was_not_reached():
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(3, 8, dtype=torch.float64)
    plan = {"*.up": ts.Column(), "*.down": ts.Row()}
    report = ts.verify(model, plan, x)
    assert report.unreached == ("other.up", "other.down")
    *_, proven, missing, lines = str(report).splitlines()
    proven_for = "equal; proven for [0] (3, 8) and [0] (4, 8), on 2 ranks"
    assert proven == f"{proven_for}, float64, in evaluation and training"
    assert lines.startswith("not proven, because these lines did not run: Rolling.forward, line ")
    assert missing == "not proven, because the batch does not reach it: other.up, other.down"
    assert {m.name: m.gradient for m in report.modules}["other.up"] is None
    assert not ts.verify(model, plan, {"x": x, "other": True}).ok


class Recurrent(nn.Module):
    """Two layers feed one another in a way that only a whole one can, beside a block that can be split."""

    def __init__(self):
        super().__init__()
        self.block, self.conv = Block(0), nn.Conv1d(1, 40, 3, padding=1)
        self.taken, self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.taken(self.block(x)) + self.conv(x.unsqueeze(1)).mean(1)
        return self.out(x * self.gate(x))


def test_the_proposal_begins_with_the_share_and_says_why_the_rest_stays_whole(capsys):
    ts.plans.auto(Recurrent(), torch.randn(3, 8))
    first, *rest = capsys.readouterr().out.splitlines()
    whole = {line.partition(":")[0]: line for line in rest if "whole, because" in line}
    assert first.startswith("41.5% of the weights are split, all parameters: ")
    assert (
        "its outputs reach gate, out, and not one layer alone (Linear, 11.0% of the weights)"
        in whole["taken"]
    )
    assert "its outputs reach out, which also takes what taken make" in whole["gate"]
    assert "only linear layers, embeddings and experts are split (Conv1d" in whole["conv"]
    assert rest[-1] == "proven for [0] (3, 8); and, with values of tp's own, [0] (4, 8)"


def test_a_model_that_cannot_be_called_needs_a_batch():
    for model, words in [
        (nn.Sequential(Block(0)), "Sequential cannot be called without a batch of yours: auto"),
        (
            nn.Sequential(nn.Embedding(5, 4), nn.Linear(3, 3)),
            "fails on what was made up for it .*a batch",
        ),
    ]:
        with pytest.raises(ModelError, match=words):
            ts.plans.auto(model)


def test_a_model_of_which_nothing_can_be_split_is_refused():
    with pytest.raises(ConfigError, match=r"could be split over 2 ranks and proven right \(\*: its"):
        ts.plans.auto(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))[:1], torch.randn(3, 8))


def test_masks_stay_masks_in_batches_of_tps_own():
    seen = []

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 2)

        def forward(self, x, attention_mask, labels):
            if x.device.type == "cpu" and type(x) is torch.Tensor:
                seen.append((x.clone(), attention_mask.clone(), labels.clone()))
            return self.down(self.up(x * attention_mask).relu()) * (labels > 0)

    given = {"x": torch.ones(2, 5), "attention_mask": torch.ones(2, 5), "labels": torch.tensor([[-100, 1]])}
    ts.plans.auto(Masked(), given, verbose=False)
    others = [call for call in seen if call[0].size(0) == 3 and call[0].size(1) == 5]
    assert others
    for x, mask, labels in others:
        assert mask[0].tolist() == [0, 1, 1, 1, 1]
        assert mask[1].tolist() == [1, 1, 1, 1, 0]
        assert set(labels.unique().tolist()) <= {-100, 1}
        assert x.unique().numel() > 2
