"""Training on slices of sequences equals training on one device, or is refused by the module's name."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from tp_context import attention, gather, positions
from tp_core.errors import DisagreementError, ModelError, StepError, TpError
from tp_data import Loader, Packed, Stream, TokenBudget
from tp_testing import RankPool, TrainingConformance
from tp_trainer import Checkpoints, Limits, Trainer

from tests.installed import backend_class
from tests.integration import context_families as families

NIGHTLY = [
    ("mistral", "packed"), ("gpt2", "prefix"), ("bert", "right"),
    ("llama", "packed"), ("qwen3", "none"), ("gemma2", "none"), ("gpt_oss", "none"), ("mixtral", "none"),
    ("opt", "left"), ("roberta", "right"), ("modernbert", "none"), ("falcon", "none"),
    ("bart", "left"), ("qwen2_moe", "right"),
]  # fmt: skip

TOKENS, ROWS, VOCABULARY, WIDTH = 13, 2, 11, 8


class Samples(Dataset):
    """Rows of tokens; in some, labels count in the middle alone, which one rank of two has."""

    def __init__(self, tokens=TOKENS, count=6):
        generator = torch.Generator().manual_seed(5)
        self.rows = []
        for row in range(count):
            ids = torch.randint(1, VOCABULARY, (tokens,), generator=generator)
            labels = F.pad(ids[1:], (0, 1), value=-100)
            labels[: row % 3] = -100
            if row in {2, 3}:
                labels[:4] = labels[9:] = -100
            padding = torch.zeros(tokens, dtype=torch.bool)
            padding[tokens - row % 4 :] = True
            labels[padding] = -100
            documents = (torch.arange(tokens) >= 2 + row % 2).long()
            self.rows.append({"tokens": ids, "labels": labels, "padding": padding, "documents": documents})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Decoder(nn.Module):
    """A decoder by hand, whose attention is torch's function."""

    def __init__(self, dropout=0.0, recomputes=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.mixing = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes
        self.steps = 0

    def attend(self, x):
        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        return self.dropout(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, tokens):
        self.steps += self.training
        x = self.embedding(tokens) + self.places(self.number(tokens))
        x = x + (checkpoint(self.attend, x, use_reentrant=False) if self.recomputes else self.attend(x))
        return self.head(x).clone()  # torch warns of a view as the output of a sharded unit

    def number(self, tokens):
        return positions(tokens.size(1))


class Encoder(nn.Module):
    """torch's own layer of an encoder, with padding; or under a causal mask."""

    def __init__(self, causal=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.causal = causal

    def forward(self, tokens, padding):
        x = self.embedding(tokens)
        x = x + positions(tokens.size(1))[:, None].to(x) / 10
        if not self.causal:
            return self.head(self.layer(x, src_key_padding_mask=padding))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), dtype=x.dtype)
        return self.head(self.layer(x, src_mask=mask, is_causal=True))


class Stack(Encoder):
    """torch's stack of layers, with padding and a mask of near positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoder(self.layer, 2)

    def forward(self, tokens, padding):
        x = self.embedding(tokens)
        x = x + positions(tokens.size(1))[:, None].to(x) / 10
        far = (positions(tokens.size(1))[:, None] - torch.arange(gather(tokens, 1).size(1))).abs() > 5
        return self.head(self.layer(x, mask=far, src_key_padding_mask=padding))


class OwnAttention(Decoder):
    """Attention of more queries than keys and values, with a mask made from the positions."""

    def attend(self, x):
        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        mixed = attention(q, k[:, :1], v[:, :1], self.see(x, gather(x, 1).size(1)), enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2) + gather(x, 1).mean(1, keepdim=True)

    def see(self, x, keys):
        return (positions(x.size(1))[:, None] - torch.arange(keys)).abs() < 4


class Flexible(Decoder):
    """Attention by torch's flex_attention, with a mask of blocks and a function of scores."""

    def attend(self, x):
        from torch.nn.attention import flex_attention as flex

        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        near = flex.create_block_mask(sees_near, None, None, x.size(1), x.size(1), device="cpu")
        return flex.flex_attention(*parts, add_distance, near).transpose(1, 2).flatten(2)


def sees_near(_batch, _head, query, key):
    return (query >= key) & (query - key < 6)


def add_distance(score, _batch, head, query, key):
    return score - (query - key) * 2.0**-head


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def step(model, batch):
    more = "padding" if isinstance(model, Encoder) else "documents" if isinstance(model, Documents) else ""
    logits = model(batch["tokens"], *([batch[more]] if more else []))
    counts = batch["labels"] != -100
    hits = (logits.argmax(-1) == batch["labels"])[counts].double()
    return {
        "loss": loss_of(logits, batch["labels"]),
        "weight": counts.sum(),
        "accuracy": (hits.mean() if len(hits) else math.nan, len(hits)),
    }


def predict_step(model, batch):
    return {"logits": model(batch["tokens"])}


def make(model_class, *arguments):
    torch.manual_seed(1)
    return model_class(*arguments).double()


def train(
    backend,
    model,
    *,
    options=None,
    more=None,
    accumulate=1,
    samples=6,
    batch_size=ROWS,
    predicts=False,
    **arguments,
):
    """Train for an epoch, with a validation; return its record, the weights, and predictions."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # on the ranks, too
    chosen = {} if options is None else {"options": {backend: options, **(more or {})}}
    loader = DataLoader(Samples(count=samples), batch_size=batch_size)
    with Trainer(
        backend=backend, devices="cpu", seed=3, progress=False, accumulate=accumulate, **chosen
    ) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        validation = DataLoader(Samples(11, 3), batch_size=2)
        (record,) = trainer.fit(
            model, optimizer, loader, step=step, validation=validation, epochs=1, **arguments
        )[-1:]
        rows = trainer.predict(model, validation, step=predict_step).collect() if predicts else None
        state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    return dict(record.train), dict(record.val), state, rows


def assert_same(found, expected):
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert one.keys() == other.keys()
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-13)
    if expected[3] is not None:
        torch.testing.assert_close(found[3], expected[3], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_a_decoder_on_slices_equals_one_device(two_ranks):
    def trained(backend):
        model = make(Decoder)
        return train(backend, model, predicts=True), model.steps

    expected, steps = trained("single")
    for found, own in two_ranks.run(trained, "context"):
        assert_same(found, expected)
        assert own == steps + 2, "one check, with the piece and with its slice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ((Encoder,), "all-gather"),
        ((Encoder, True), "all-gather"),
        ((Encoder, False, 0.3), "all-gather"),
        ((Encoder, True, 0.3), "ulysses"),
        ((Encoder,), "ring"),
        ((Stack,), "all-gather"),
        ((OwnAttention,), "all-gather"),
        ((OwnAttention,), "ulysses"),
        ((OwnAttention,), "ring"),
        ((Decoder, 0.0, True), "all-gather"),
        ((Decoder, 0.0, True), "ring"),
        ((Decoder, 0.4), "auto"),
        ((Decoder, 0.4, True), "ulysses"),
    ],
)
def test_attention_by_every_function_equals_one_device(two_ranks, model, algorithm):
    expected = train("single", make(*model))
    for found in two_ranks.run(lambda: train("context", make(*model), options={"attention": algorithm})):
        assert_same(found, expected)


class Pooled(Decoder):
    """Makes a vector of each sequence, as wide as a slice is long."""

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places(self.number(tokens))
        x = F.dropout(x, 0.4, self.training, inplace=True)
        vector = gather(x + self.attend(x), 1).mean(1)
        return self.dropout(vector), self.head(self.dropout(vector))


class PooledByRows(Pooled):
    """Drops vectors of each sequence, too, of which there are as many as a slice has tokens."""

    def forward(self, tokens):
        vector, scores = super().forward(tokens)
        vectors = self.dropout(vector[:, None] + self.mixing.weight[:WIDTH])
        return vectors.mean(1), scores


def pooled(backend, model_class):
    torch.set_num_threads(1)
    model, loader = make(model_class, 0.4), DataLoader(Samples(2 * WIDTH), batch_size=ROWS)

    def step(model, batch):
        vector, scores = model(batch["tokens"])
        return {"loss": (scores.square().mean() + vector.mean()), "weight": len(scores)}

    def predict(model, batch):
        return {"vector": model(batch["tokens"])[0]}

    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        (record,) = trainer.fit(
            model, torch.optim.SGD(model.parameters(), lr=0.5), loader, step=step, epochs=1
        )
        vectors = trainer.predict(model, loader, step=predict).collect()["vector"]
        return record.train["loss"], vectors, trainer.session.model_state(model)


@pytest.mark.parametrize("model_class", [Pooled, PooledByRows])
def test_a_width_as_long_as_a_slice_is_not_taken_for_one(two_ranks, model_class):
    expected = pooled("single", model_class)
    assert expected[1].shape == (6, WIDTH)
    for found in two_ranks.run(pooled, "context", model_class):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Described(Decoder):
    """Takes features of each sample, which are none of its tokens."""

    def forward(self, tokens, features):
        return super().forward(tokens) * features.mean(1)[:, None, None]


class Crossing(Decoder):
    """Attends from its tokens to frames, which are a sequence of their own."""

    def forward(self, tokens, features):
        x = self.embedding(tokens) + self.places(self.number(tokens))
        keys = self.mixing(features.mean(-1, keepdim=True).expand(-1, -1, WIDTH))[:, None, :, :WIDTH]
        return self.head(x + attention(x[:, None], keys, keys).squeeze(1))


def described(backend, model_class, shapes):
    """Train on sequences of which the second are as long as there are features."""
    torch.set_num_threads(1)
    model = make(model_class)

    def step(model, batch):
        logits = model(batch["tokens"], batch["features"])
        return {"loss": loss_of(logits, batch["labels"]), "weight": (batch["labels"] != -100).sum()}

    batches = []
    for tokens, shape in zip((TOKENS, WIDTH), shapes, strict=True):
        rows = torch.utils.data.default_collate(Samples(tokens).rows[:ROWS])
        features = torch.arange(ROWS * math.prod(shape)).double().reshape(ROWS, *shape).sin() + 2
        batches.append({"tokens": rows["tokens"], "labels": rows["labels"], "features": features})
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            (record,) = trainer.fit(model, optimizer, batches, step=step, epochs=1)
        except ModelError as error:
            return str(error)
        return record.train["loss"], trainer.session.model_state(model)


@pytest.mark.parametrize(
    ("model_class", "shapes"),
    [(Described, [(WIDTH,), (WIDTH,)]), (Crossing, [(TOKENS, WIDTH), (TOKENS - 2, WIDTH)])],
)
def test_features_as_many_as_a_later_batch_has_tokens_are_not_cut(two_ranks, model_class, shapes):
    expected = described("single", model_class, shapes)
    for found in two_ranks.run(described, "context", model_class, shapes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_features_as_many_as_the_first_batch_has_tokens_are_named(two_ranks):
    for said in two_ranks.run(described, "context", Described, [(TOKENS,), (TOKENS,)]):
        assert "split because they are as long as the tokens ('features'): if one is no sequence" in said


class WithinTokens(Decoder):
    """Attends within each token as well, to as many features as a slice has tokens."""

    def attend(self, x):
        features = x[..., None]
        return super().attend(x) + F.scaled_dot_product_attention(features, features, features).squeeze(-1)


class OfEverySecond(Decoder):
    """Attends among every second token as well: on two ranks as many as a slice has."""

    def attend(self, x):
        tokens = gather(x, 1)[:, ::2]
        return super().attend(x) + F.scaled_dot_product_attention(tokens, tokens, tokens).mean(
            1, keepdim=True
        )


def attending_twice(backend, model_class):
    torch.set_num_threads(1)
    model = make(model_class)
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(Samples(2 * WIDTH), batch_size=ROWS)
        (record,) = trainer.fit(model, optimizer, loader, step=step, epochs=1)
        return record.train["loss"], trainer.session.model_state(model)


@pytest.mark.parametrize("model_class", [WithinTokens, OfEverySecond])
def test_attention_to_something_as_long_as_a_slice_is_not_taken_for_one(two_ranks, model_class):
    expected = attending_twice("single", model_class)
    for found in two_ranks.run(attending_twice, "context", model_class):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Weighing(Encoder):
    """Attention whose weights are returned, with dropout of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True, add_bias_kv=True)

    def forward(self, tokens, padding):
        x = self.embedding(tokens)
        mixed, weights = self.layer(x, x, x, key_padding_mask=padding)
        return self.head(x + mixed + weights.square().sum(-1, keepdim=True))


@pytest.mark.slow
def test_weights_of_attention_with_dropout_equal_those_of_one_device(two_ranks):
    expected = train("single", make(Weighing))
    for found in two_ranks.run(lambda: train("context", make(Weighing))):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "context"), [(3, 3), (4, 2)])
def test_any_ranks_and_accumulated_uneven_batches_equal_one_device(ranks, context):
    arguments = {"samples": 7, "batch_size": 3}
    expected = train("single", make(Decoder), **arguments)
    with RankPool(ranks) as pool:
        for found in pool.run(
            lambda: train("context", make(Decoder), options={"context": context}, **arguments)
        ):
            assert_same(found, expected)


def of_two_runs(backend, *, recomputes):
    """Go back once from two runs of different lengths, whose slices are as long in the second step."""
    torch.set_num_threads(1)
    model = make(Decoder, 0.0, recomputes)
    with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
        prepared, optimizer = trainer.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for tokens in ((13, 22), (14, 9)):
            batches = [torch.utils.data.default_collate(Samples(n).rows[:2]) for n in tokens]
            trainer.backward(sum(trainer.run(step, prepared, batch)["loss"] for batch in batches))
            optimizer.step()
            optimizer.zero_grad()
        return {n: t.clone() for n, t in trainer.session.model_state(prepared).items()}


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_one_backward_pass_follows_several_runs_of_any_length(two_ranks, recomputes):
    expected = of_two_runs("single", recomputes=recomputes)
    for found in two_ranks.run(partial(of_two_runs, "context", recomputes=recomputes)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)


def predict(backend):
    """Predict with flex_attention; return what training says: on a CPU it has no backward pass."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # it asks for torch.compile
    model, loader = make(Flexible), DataLoader(Samples(), batch_size=ROWS)
    with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
        rows = trainer.predict(model, loader, step=predict_step).collect()["logits"]
        with pytest.raises((NotImplementedError, ModelError)) as caught:
            trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=step, epochs=1)
    return rows, str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_on_slices_equals_one_device(two_ranks):
    expected, said = predict("single")
    for rows, text in two_ranks.run(predict, "context"):
        torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-13)
        assert said.splitlines()[0] in text


# -- Beside other dimensions --


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.line(x))


class Blocks(Decoder):
    """A decoder of blocks, whose heads may be split over ranks."""

    def __init__(self, recomputes=False):
        super().__init__(recomputes=recomputes)
        self.outputs = nn.ModuleList(Mix() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))  # fully_shard keeps a number whole

    def attend(self, x):
        parts = self.mixing(x).unflatten(-1, (3, -1, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        return self.outputs[1](self.outputs[0](mixed) * self.scale)


def in_layout(layout, *, model=Blocks, **arguments):
    """Train in a layout: the options of "context" and of the backend that holds its weights."""
    if layout is None:
        return train("single", make(model), **arguments)
    if isinstance(layout, str):
        return train(layout, make(model), **arguments)
    options, more = layout
    if options.get("weights") != "shard":
        return train("context", make(model), options=options, more=more, **arguments)
    ts = pytest.importorskip("tp_shard")
    ts.distributed.init_process_group(2)
    try:
        split = ts.parallelize(
            make(model),
            {
                "embedding": ts.Vocab(),
                "mixing": ts.Column(heads=2, holds="qkv"),
                "outputs.0.line": ts.Row(heads=2),
                "head": ts.Vocab(gather_output=True),
            },
        )
        return train("context", split, options=options, more=more, **arguments)
    finally:
        ts.distributed.destroy_process_group()


FSDP = {"context": 2, "weights": "fsdp"}, {"fsdp": {"units": "Mix"}}
GATHERED_ONCE = {"context": 2, "weights": "fsdp"}, {"fsdp": {"units": "Mix", "reshard_after_forward": False}}
SHARD = {"context": 2, "weights": "shard"}, {"shard": {"group_size": 2, "data": "ddp"}}
BOTH = {"context": 2, "weights": "shard"}, {"shard": {"group_size": 2, "data": "fsdp"}}


UNEVEN = {"accumulate": 2, "samples": 7, "batch_size": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        pytest.param(FSDP, {}, id="fsdp"),
        pytest.param(GATHERED_ONCE, UNEVEN, id="fsdp, gathered once, uneven"),
        pytest.param(BOTH, UNEVEN, id="shard and fsdp, uneven"),
        pytest.param(FSDP, UNEVEN, id="fsdp, uneven", marks=pytest.mark.nightly),
        pytest.param(SHARD, {}, id="shard", marks=pytest.mark.nightly),
        pytest.param(SHARD, UNEVEN, id="shard, uneven", marks=pytest.mark.nightly),
        pytest.param(BOTH, {}, id="shard and fsdp", marks=pytest.mark.nightly),
    ],
)
def test_weights_may_be_sharded_or_split_beside_the_sequences(four, layout, arguments):
    arguments = {**arguments, "clip_norm": 0.5, "predicts": True}
    expected = in_layout(None, **arguments)
    for found in four.run(partial(in_layout, layout, **arguments)):
        assert_same(found, expected)


def begin(layout, folder):
    in_layout(layout, checkpoint=Checkpoints(folder, every_steps=1), max_steps=2)


def end(layout, folder):
    return in_layout(layout, checkpoint=Checkpoints(folder, every_steps=1), resume="auto")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        pytest.param(FSDP, [None, "ddp"], marks=pytest.mark.nightly),
        (BOTH, [({"context": 4}, {})]),
        pytest.param(None, [FSDP, SHARD], marks=pytest.mark.nightly),
    ],
)
def test_a_run_is_resumed_beside_other_dimensions(four, tmp_path, layout, others):
    expected = in_layout(None)
    for i, other in enumerate(others):
        folder = str(tmp_path / str(i))
        begin(layout, folder) if layout is None else four.run(begin, layout, folder)
        for found in [end(other, folder)] if other is None else four.run(end, other, folder):
            assert_same(found, expected)


@pytest.mark.slow
def test_a_run_is_resumed_on_other_layouts(two_ranks, tmp_path):
    def begun(backend, folder):
        train(backend, make(Decoder), checkpoint=Checkpoints(folder, every_steps=1), max_steps=2)

    def ended(backend, folder):
        return train(backend, make(Decoder), checkpoint=Checkpoints(folder, every_steps=1), resume="auto")

    expected = train("single", make(Decoder))
    two_ranks.run(begun, "context", str(tmp_path / "one"))
    assert_same(ended("single", str(tmp_path / "one")), expected)
    begun("single", str(tmp_path / "two"))
    for found in two_ranks.run(ended, "context", str(tmp_path / "two")):
        assert_same(found, expected)


# -- Refusals, before the first step --


class Counting(Decoder):
    def number(self, tokens):
        return torch.arange(tokens.size(1))


class Convolving(Decoder):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def attend(self, x):
        return super().attend(x) + self.convolution(x.mT).mT


class Normalizing(Decoder):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def attend(self, x):
        return self.norm(super().attend(x).mT).mT


class Pooling(Decoder):
    def attend(self, x):
        return super().attend(x) + x.mean(1, keepdim=True)


class ByHand(Decoder):
    def attend(self, x):
        q, k, v = self.mixing(x).chunk(3, -1)
        return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


class Recurrent(Decoder):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def attend(self, x):
        return self.cells(x)[0]


class Masked(Decoder):
    def attend(self, x):
        parts = self.mixing(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        banded = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril().triu(-3)
        return F.scaled_dot_product_attention(*parts, banded).transpose(1, 2).flatten(2)


def shifting(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    return {"loss": loss_of(logits, batch["tokens"][:, 1:]), "weight": logits[..., 0].numel()}


def unweighted(model, batch):
    return loss_of(model(batch["tokens"]), batch["labels"])


def miscounting(model, batch):
    return {"loss": unweighted(model, batch), "weight": batch["labels"].numel()}


def by_rank(model, batch):
    """Fail on one rank alone: the other one waits for its keys."""
    if batch["tokens"].size(1) == TOKENS // 2:
        raise ValueError("a short slice")
    return step(model, batch)


def late_by_rank(model, batch):
    """Fail on one rank alone, when the other one already joins the numbers of both."""
    output = step(model, batch)
    if batch["tokens"].size(1) == TOKENS // 2:
        raise ValueError("a short slice at the end")
    return output


class Cut(OwnAttention):
    """A window of attention that ends at the seam of two slices."""

    def see(self, x, keys):
        at = torch.arange(x.size(1))
        near = (at[:, None] - at).abs() < 4
        return F.pad(near, (0, keys - x.size(1)))


class Seeing(OwnAttention):
    """Rows of a mask of the whole sequence, by their positions."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.register_buffer("visible", torch.rand(64, 64, generator=generator) < 0.7)
        self.visible.fill_diagonal_(fill_value=True)

    def rows(self, count):
        return positions(count)

    def see(self, x, keys):
        return self.visible[self.rows(x.size(1)), :keys]


class SeeingOthers(Seeing):
    def rows(self, count):
        return torch.arange(count)


class Documents(OwnAttention):
    """Attention within documents."""

    def number_of(self, documents):
        return documents

    def see(self, x, keys):
        return (self.number_of(self.documents)[:, :, None] == gather(self.documents, 1)[:, None])[:, None]

    def forward(self, tokens, documents):
        self.documents = documents
        return super().forward(tokens)


class Mixed(Documents):
    def number_of(self, documents):
        return documents - documents[:, :1]  # each slice begins at document 0


class Detaching(OwnAttention):
    """Keys of other ranks without their gradients."""

    def attend(self, x):
        q, k, v = self.mixing(x).chunk(3, -1)
        keys, values = (
            gather(part.detach(), 1).index_copy(1, positions(part.size(1)), part) for part in (k, v)
        )
        return (q @ keys.mT / WIDTH**0.5).softmax(-1) @ values


class Dropping(Decoder):
    def attend(self, x):
        mixed = super().attend(x)
        return mixed * (torch.rand_like(mixed) > 0.3)


class DrawingRarely(Decoder):
    """Draws numbers of each token that make a difference only where they are large."""

    def attend(self, x):
        mixed = super().attend(x)
        return mixed * (torch.rand_like(mixed) < 1 - 1e-12)


class Crowding(Decoder):
    """Leaves out the tokens beyond a capacity, as experts do, which only longer sequences have."""

    def attend(self, x):
        mixed = super().attend(x)
        return mixed * ((mixed.detach() > 0).cumsum(1) < 1000)


class Summing(Decoder):
    """Counts on over the features of each token."""

    def attend(self, x):
        return super().attend(x).cumsum(-1)


class DrawingOnce(Decoder):
    """Draws one number for all tokens, as dropout of layers does."""

    def attend(self, x):
        return super().attend(x) * torch.rand(())


class Scaling(Decoder):
    def attend(self, x):
        return super().attend(x) / x.norm(dim=1, keepdim=True)


# In the code of a forward, whatever is called after it.
BY_HAND = r"'the model' \(\w+\) computes something else .*, in what it passes to 'head'\)"
IN_PLACES = BY_HAND.replace("head", "places")

# What parallel code gets wrong: the split model trains, and learns something else.
FAULTS = {
    "labels shifted at the seam": (Decoder, shifting, "it uses tokens of other ranks"),
    "positions from 0 on each rank": (Counting, step, IN_PLACES),
    "a window cut at the seam": (Cut, step, BY_HAND),
    "a missing factor in a mean": (Decoder, miscounting, "a mean over something else"),
    "gradients of keys not summed": (Detaching, step, "the gradient of .* differs from the whole"),
    "dropout unlike": (Dropping, step, f"{BY_HAND}: .* or draws random numbers"),
    "numbers that rarely count": (DrawingRarely, step, r"'the model' \(DrawingRarely\) draws random numbers"),
    "a capacity": (Crowding, step, r"'the model' \(Crowding\) accumulates over the tokens of a slice"),
    "the mask of another slice": (SeeingOthers, step, BY_HAND),
    "a document mixed with its neighbor": (Mixed, step, BY_HAND),
    "a norm over the slice": (Scaling, step, BY_HAND),
    "a convolution at the seam": (Convolving, step, r"'convolution' \(Conv1d\)"),
}

REFUSED = [
    (Counting, step, IN_PLACES),
    (Decoder, shifting, "though all modules compute the same: it uses tokens of other ranks"),
    (Convolving, step, r"'convolution' \(Conv1d\) computes something else"),
    (Normalizing, step, r"'norm' \(BatchNorm1d\) computes something else"),
    (Pooling, step, BY_HAND),
    (ByHand, step, BY_HAND),
    (Recurrent, step, r"'cells' \(GRU\) computes something else"),
    (Masked, step, r"a slice of the sequence: StepError: an attention mask has shape \(\d+, \d+\)"),
    (Decoder, unweighted, "StepError: the step returned no 'weight'"),
    (Decoder, miscounting, "or is a mean over something else than the 'weight'"),
    (Decoder, by_rank, "ValueError: a short slice"),
    (Decoder, late_by_rank, "ValueError: a short slice at the end"),
]


def refusals(cases, tokens=TOKENS, **options):
    """Return what is said of each case; in one call, as a rank starts slowly."""
    torch.set_num_threads(1)
    said = []
    for model_class, body in cases:
        model = make(model_class)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(Samples(tokens), batch_size=ROWS)
        with Trainer(
            backend="context", devices="cpu", seed=0, progress=False, options={"context": options}
        ) as trainer:
            try:
                trainer.fit(model, optimizer, loader, step=body, epochs=1)
            except (ModelError, StepError, DisagreementError) as error:
                said.append((type(error).__name__, str(error)))
            else:
                said.append(("", "trained"))
            after = trainer.session.model_state(model)
        assert said[-1][1] == "trained" or all(torch.equal(t, before[n]) for n, t in after.items())
    return said


@pytest.mark.parametrize("cases", [REFUSED[:3], pytest.param(REFUSED[3:], marks=pytest.mark.slow)])
def test_what_crosses_the_slices_outside_of_attention_is_refused_by_name(two_ranks, cases):
    said = two_ranks.run(refusals, [(m, s) for m, s, _ in cases])
    assert said[0] == said[1], "all ranks say the same"
    for (kind, text), (model, body, expected) in zip(said[0], cases, strict=True):
        assert kind == "ModelError", (model, body, text)
        assert re.search(expected, text), (model, body, text)


@pytest.mark.slow
def test_planted_faults_are_found_and_what_is_right_trains(two_ranks):
    right = [(m, step) for m in (Decoder, OwnAttention, Seeing, Documents, DrawingOnce, Summing)]
    said = two_ranks.run(refusals, [(m, s) for m, s, _ in FAULTS.values()] + right)
    assert said[0] == said[1]
    for (fault, (_, _, pattern)), (kind, text) in zip(FAULTS.items(), said[0], strict=False):
        assert kind == "ModelError", (fault, text)
        assert re.search(pattern, text), (fault, text)
    assert said[0][len(FAULTS) :] == [("", "trained")] * len(right)


@pytest.mark.nightly
def test_what_cannot_be_split_is_refused_on_all_ranks_that_hold_shards(four):
    names = [ByHand, Counting]
    cases = [(m, s) for m, s, _ in REFUSED if m in names or s in (by_rank, late_by_rank, miscounting)]
    said = four.run(partial(refusals, cases, context=2, weights="fsdp"))
    assert all(each == said[0] for each in said)
    expected = [pattern for m, s, pattern in REFUSED if (m, s) in cases]
    for (kind, text), pattern in zip(said[0], expected, strict=True):
        assert kind == "ModelError"
        assert re.search(pattern, text), text


def on_different_batches(rank_of):
    import torch.distributed as dist

    torch.set_num_threads(1)
    said = []
    for tokens in (0, 1):
        with Trainer(backend="context", devices="cpu", seed=0, progress=False) as trainer:
            model = make(Decoder)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            trainer.prepare(model, optimizer)
            rank = dist.get_rank()
            rows = Samples(TOKENS + 2 * tokens * rank).rows[2 * rank * (1 - tokens) :][:2]
            batch = torch.utils.data.default_collate(rows)
            with pytest.raises(DisagreementError, match="have different batches") as caught:
                trainer.run(step, model, batch)
            said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_ranks_of_a_sequence_with_different_batches_are_refused(two_ranks):
    same, other = two_ranks.run(on_different_batches, None)[0]
    assert "of [13] tokens on the first, of [13]" in same
    assert "of [13] tokens on the first, of [15]" in other


@pytest.mark.slow
class TestTraining(TrainingConformance):
    backend = backend_class("context")
    processes = 2


BAD = {  # options, the number of tokens, a model, and what is said
    "more ranks than tokens": ({}, 1, Decoder, "a sequence of 1 token.* cannot be split over 2 ranks"),
    "ranks": ({"context": 3}, 8, Decoder, "2 ranks are not a multiple of it"),
    "a number": ({"context": 0}, 8, Decoder, "must be -1 for all ranks, or their number, got 0"),
    "no such weights": (
        {"weights": "halves"},
        8,
        Decoder,
        "or a backend with ranks that can share samples",
    ),
    "unfit weights": ({"weights": "shard"}, 8, Decoder, "weights='shard': the model has no split parameters"),
    "no such sequence": (
        {"sequence": {"words": 1}},
        8,
        Decoder,
        "names 'words' with dimension 1",
    ),
    "compiled": ({"compiles": True}, 8, Decoder, "compile=True does not go with backend 'context'"),
    "a mask of the wrong shape": ({}, 16, Masked, "an attention mask has shape"),
    "attention by hand": ({}, 8, ByHand, r"'the model' \(ByHand\) computes something else"),
}


def bad_input(cases):
    torch.set_num_threads(1)
    said = []
    for options, tokens, model_class, _ in cases:
        model, own = make(model_class), {n: v for n, v in options.items() if n != "compiles"}
        try:
            with Trainer(
                backend="context", devices="cpu", seed=0, progress=False, options={"context": own},
                compile="compiles" in options,
            ) as trainer:  # fmt: skip
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                trainer.fit(model, optimizer, DataLoader(Samples(tokens), batch_size=2), step=step, epochs=1)
        except TpError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_bad_input_is_one_sentence_on_all_ranks(two_ranks):
    said = two_ranks.run(bad_input, list(BAD.values()))
    assert said[0] == said[1]
    for text, (what, (*_, pattern)) in zip(said[0], BAD.items(), strict=True):
        assert re.search(pattern, text), (what, text)


# -- Models of transformers; context_families.py prints the table of all --


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("llama", "left"),
        ("whisper", "none"),
        pytest.param("t5", "left", marks=pytest.mark.nightly),
        *[pytest.param(n, m, marks=pytest.mark.nightly) for n, m in NIGHTLY],
    ],
)
def test_models_of_transformers_equal_one_device(name, mask):
    with RankPool(3 if name == "mistral" else 2) as ranks:
        assert families.outcome(name, mask, ranks)[0] == "right"


@pytest.mark.nightly
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", families.FURTHER)
def test_further_models_with_dropout_equal_one_device(two_ranks, name):
    assert families.outcome(name, "none", two_ranks, dropout=0.1)[0] == "right"


@pytest.mark.nightly
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mpt", r"attn' \(MptAttention\)"),
        ("megatron_bert", r"self' \(MegatronBertSelfAttention\)"),
        ("mvp", r"self_attn' \(MvpAttention\)"),
        ("gpt_neo", r"attention' \(GPTNeoSelfAttention\)"),
        ("xlnet", r"rel_attn' \(XLNetRelativeAttention\)"),
        ("roformer", r"self' \(RoFormerSelfAttention\)"),
        ("squeezebert", r"attention.softmax' \(Softmax\)"),
        ("mobilebert", r"embeddings' \(MobileBertEmbeddings\)"),
        ("mpnet", r"embeddings' \(MPNetEmbeddings\) .*, in what it passes to 'position_embeddings'"),
        ("blenderbot", r"\(BlenderbotForConditionalGeneration\) .* passes to 'model' as 'decoder_input_ids'"),
        ("phimoe", r"mlp.*\(Phimoe\w+\).* draws? random numbers"),
    ],
)
def test_what_a_model_computes_by_hand_is_named_by_its_module(two_ranks, name, said):
    result, text = families.outcome(name, "none", two_ranks)
    assert result == "refused"
    assert re.search(said, text)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mamba", r"mixer.*\(MambaMixer\) computes something else"),
        pytest.param("vit", "not clear what in the batch has the sequence", marks=pytest.mark.nightly),
    ],
)
def test_models_of_transformers_that_cannot_be_split_are_refused(two_ranks, name, said):
    result, text = families.outcome(name, "none", two_ranks)
    assert result == "refused"
    assert re.search(said, text)


def trained_as_it_is(name, seed):
    """Train a model in float64 that computes in float32 inside, with weights of a seed."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = families.make_model(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.02)
    loader = DataLoader(families.Samples(name, "none"), batch_size=families.ROWS)
    with Trainer(backend="context", devices="cpu", seed=0, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer.fit(model, optimizer, loader, step=families.step, epochs=1)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["olmo2", "gemma2"])  # norms in float32; weights of attention in one run
def test_a_check_in_float64_allows_for_what_a_model_computes_in_float32(two_ranks, name):
    for seed in range(4):
        two_ranks.run(trained_as_it_is, name, seed)


def adapted(backend):
    """Train adapters of peft; return losses, the state, and what the model then generates."""
    import peft

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with families.all_in_float64():
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(families.make_model("llama"), config).double()
        loader = DataLoader(families.Samples("llama", "left"), batch_size=3)
        with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
            trained = [p for p in model.parameters() if p.requires_grad]
            (record,) = trainer.fit(
                model, torch.optim.SGD(trained, lr=0.5), loader, step=families.step, epochs=1
            )
            loss = trainer.evaluate(model, loader, step=families.step)["loss"]
            plain = trainer.session.unwrap(model)
            tokens = plain.generate(torch.arange(3, 12)[None], max_new_tokens=5, do_sample=False)
            return [record.train["loss"], loss], dict(trainer.session.model_state(model)), tokens.tolist()


@pytest.mark.slow
@pytest.mark.needs("peft", "transformers")
@pytest.mark.filterwarnings("ignore")  # between these two libraries
def test_adapters_train_on_slices_and_the_model_generates_on_each_rank(two_ranks):
    expected = adapted("single")
    for found in two_ranks.run(adapted, "context"):
        assert families.difference(found[:2], expected[:2]) < 1e-12
        assert found[2] == expected[2]


class OwnMask(nn.Module):
    """A Llama under a causal mask, joined to two functions of positions by transformers."""

    def __init__(self):
        super().__init__()
        self.model = families.make_model("llama")

    def forward(self, input_ids, labels):
        from transformers.masking_utils import create_causal_mask

        embedded = self.model.get_input_embeddings()(input_ids)
        mask = create_causal_mask(
            self.model.config, embedded, None, None, or_mask_function=in_prefix, and_mask_function=is_near
        )
        return self.model(inputs_embeds=embedded, attention_mask=mask, labels=labels).loss


def in_prefix(_batch, _head, _query, key):
    return key < 7


def is_near(_batch, head, query, key):
    return (query - key < 12) | (key == 0)


def step_of_own_mask(model, batch):
    return model(**batch)


def under_own_mask(backend):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with families.all_in_float64():
        model = OwnMask()
        loader = DataLoader(families.Samples("llama", "none"), batch_size=3)
        with Trainer(backend=backend, devices="cpu", seed=0, progress=False) as trainer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            (record,) = trainer.fit(model, optimizer, loader, step=step_of_own_mask, epochs=1)
            return [record.train["loss"]], dict(trainer.session.model_state(model))


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_functions_of_masks_in_transformers_equal_one_device(two_ranks):
    expected = under_own_mask("single")
    for found in two_ranks.run(under_own_mask, "context"):
        assert families.difference(found, expected) < 1e-12


def asking_for_weights(model, batch):
    return model(**batch, output_attentions=True).loss


def asked_for_weights():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = families.make_model("llama")
    model.set_attn_implementation("eager")
    loader = DataLoader(families.Samples("llama", "none"), batch_size=3)
    with Trainer(backend="context", devices="cpu", seed=0, progress=False) as trainer:
        with pytest.raises(ModelError) as caught:
            trainer.fit(
                model, torch.optim.SGD(model.parameters(), lr=0.1), loader, step=asking_for_weights, epochs=1
            )
        return str(caught.value)


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_weights_of_attention_are_refused(two_ranks):
    for said in two_ranks.run(asked_for_weights):
        assert "attention weights (output_attentions=True) are not there" in said


# -- Batches that know their weight --


def documents_of(batcher):
    generator = torch.Generator().manual_seed(1)
    lengths = (9, 14, 6, 13, 8, 5, 21, 30, 4, 11, 7)
    rows = [torch.randint(3, families.VOCABULARY, (n,), generator=generator) for n in lengths]
    return Loader(Stream([{"input_ids": ids, "labels": ids} for ids in rows], repeat=True), batcher)


def on_batches(backend, name, batcher):
    """Train on batches of tp-data; return what `families.train` does, and how often the model ran by then."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with families.all_in_float64():
        model = families.make_model(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        calls, steps = [], []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        optimizer.register_step_pre_hook(lambda *_: steps.append(len(calls)))
        with Trainer(backend=backend, devices="cpu", progress=False, seed=0) as trainer:
            try:
                (record,) = trainer.fit(
                    model, optimizer, documents_of(batcher), step=families.step, epochs=1,
                    limits=Limits(steps_per_epoch=3),
                )  # fmt: skip
            except ModelError as error:
                return str(error)
            return [record.train["loss"]], dict(trainer.session.model_state(model)), steps


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(
    "batcher",
    [Packed(32, rows=2, arguments="positions"), Packed(32, rows=2), TokenBudget(90, multiple=1)],
    ids=["packed by positions", "packed by masks", "by tokens"],
)
def test_batches_of_documents_equal_one_device(two_ranks, batcher):
    expected = on_batches("single", "llama", batcher)
    for found in two_ranks.run(on_batches, "context", "llama", batcher):
        assert families.difference(found[:2], expected[:2]) < 1e-12
        first, second, third = found[2]
        assert third - second == second - first == 1, "checks are before the first step alone"


@pytest.mark.slow
@pytest.mark.needs("transformers")
def test_a_model_that_mixes_packed_documents_is_refused(two_ranks):
    for said in two_ranks.run(on_batches, "context", "opt", Packed(32, rows=2, arguments="positions")):
        assert re.match(r"this model mixes up the documents of packed rows: .*self_attn", said), said
