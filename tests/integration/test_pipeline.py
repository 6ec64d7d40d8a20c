"""Training in stages on several ranks equals training on one device, or is refused with a reason."""

import math
import os
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tp_core.errors import ConfigError, DisagreementError, ModelError, StepError, TpError
from tp_trainer import Checkpoints, Trainer
from tp_trainer.callbacks import ExponentialMovingAverage

from tests.integration import pipeline_families as families

VOCABULARY, TOKENS, WIDTH = 11, 9, 8


class Block(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes and torch.is_grad_enabled():
            return x + checkpoint(self.mix, x, use_reentrant=False)
        return x + self.mix(x)

    def mix(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, blocks=8, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) / 10)
        self.layers = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.mix(self.embedding(tokens) + self.places[: tokens.size(1)])))

    def mix(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Skipping(Decoder):
    """What the first block makes is used again before the last one, and changed in place."""

    def mix(self, x):
        kept = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
            x *= 0.9
        return self.layers[-1](x + kept)


class Collecting(Decoder):
    """A hook collects what is within blocks, for a loss of its own."""

    def __init__(self):
        super().__init__()
        self.collected = []
        for layer in self.layers:
            layer.up.register_forward_hook(lambda _module, _args, output: self.collected.append(output))

    def mix(self, x):
        self.collected.clear()
        return super().mix(x) + sum(c.square().mean(-1, keepdim=True) for c in self.collected)


class Dropping(Decoder):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.down = nn.Sequential(layer.down, nn.Dropout(0.3))


def make(model_class, **options):
    torch.manual_seed(1)
    return model_class(**options).double()


def rows(count):
    generator = torch.Generator().manual_seed(5)
    found = []
    for row in range(count):
        tokens, labels = torch.randint(VOCABULARY, (2, TOKENS), generator=generator)
        labels[: row % 3 * 2] = -100
        if row in {1, 2, 3}:
            labels[:] = -100  # a micro-batch in which nothing counts
        found.append({"tokens": tokens, "labels": labels})
    return found


def step(model, batch):
    logits = model(batch["tokens"])
    counts = batch["labels"] != -100
    hits = (logits.argmax(-1) == batch["labels"])[counts].double()
    return {
        "loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100),
        "weight": counts.sum(),
        "accuracy": (hits.mean() if len(hits) else math.nan, len(hits)),
    }


def predict_step(model, batch):
    return {"logits": model(batch["tokens"])}


def train(backend, model, *, options=None, **arguments):
    """Train for two epochs, with a validation; return records, weights, and predictions."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # on the ranks, too
    chosen = {} if options is None else {"options": {backend: options}}
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False, **chosen) as trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader, validation = DataLoader(rows(14), batch_size=8), DataLoader(rows(5), batch_size=4)
        records = trainer.fit(
            model, optimizer, loader, step=step, validation=validation, epochs=2, clip_norm=0.5, **arguments
        )
        predictions = trainer.predict(model, validation, step=predict_step).collect()
        state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    return dict(records[-1].train), dict(records[-1].val), state, predictions


def assert_same(found, expected, tolerance=1e-12):
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert one.keys() == other.keys()
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[3], expected[3], rtol=tolerance, atol=tolerance)


def compare(pool, model_class, options, **given):
    expected = train("single", make(model_class, **given))
    for found in pool.run(lambda: train("pipeline", make(model_class, **given), options=options)):
        assert_same(found, expected)


def test_stages_on_two_ranks_equal_one_device(pair):
    compare(pair, Decoder, {"microbatches": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("GPipe", "InterleavedZeroBubble") else ())
        for name in families.SCHEDULES
    ],
)
def test_each_schedule_equals_one_device(four, schedule):
    compare(four, Decoder, {"schedule": schedule, "microbatches": 8})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "given"),
    [(Skipping, {}), (Collecting, {}), (Decoder, {"recomputes": True})],
    ids=["a skip over cuts", "collected by hooks", "recomputed"],
)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_what_crosses_a_cut_is_found(pair, model_class, given, schedule):
    compare(pair, model_class, {"schedule": schedule, "microbatch_size": 3}, **given)


@pytest.mark.slow
def test_dropout_is_the_same_on_any_number_of_stages(four, pair):
    def run():
        return train("pipeline", make(Dropping), options={"microbatches": 4})

    expected, *others = *pair.run(run), *four.run(run)
    for found in others:
        assert_same(found, expected)


def flat_step(model, batch):
    return F.cross_entropy(model(batch["tokens"].double()), batch["labels"].clamp(0)[:, 0])


def train_layers(backend):
    torch.manual_seed(1)
    layers = [nn.Linear(TOKENS, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)]
    model = nn.Sequential(*layers).double()
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, DataLoader(rows(8), batch_size=8), step=flat_step, epochs=2)
        return {n: t.clone() for n, t in trainer.session.model_state(model).items()}


def test_layers_without_repeated_blocks_are_cut_in_their_list(pair):
    expected = train_layers("single")
    for found in pair.run(train_layers, "pipeline"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_copies_of_stages_divide_the_samples(four):
    compare(four, Decoder, {"ranks": 2, "cuts": ["layers.5"]})


@pytest.mark.slow
def test_a_run_is_resumed_on_other_backends_and_numbers_of_stages(four, pair, tmp_path):
    def begun(backend, folder):
        train(backend, make(Decoder), checkpoint=Checkpoints(folder, every_steps=1), max_steps=3)

    def ended(backend, folder):
        return train(backend, make(Decoder), checkpoint=Checkpoints(folder, every_steps=1), resume="auto")

    expected = train("single", make(Decoder))
    for name, backend, pool in [("one", "single", None), ("two", "pipeline", pair), ("fsdp", "fsdp", pair)]:
        folder = str(tmp_path / name)
        four.run(begun, "pipeline", folder)
        for found in [ended(backend, folder)] if pool is None else pool.run(ended, backend, folder):
            assert_same(found, expected, 1e-9)
    begun("single", str(tmp_path / "back"))
    for found in pair.run(ended, "pipeline", str(tmp_path / "back")):
        assert_same(found, expected, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"), [("llama", "1F1B"), pytest.param("t5", "ZBVZeroBubble", marks=pytest.mark.nightly)]
)
def test_models_of_transformers_equal_one_device(pair, name, schedule):
    expected = families.train(name, "single")
    for found in pair.run(partial(families.train, name, "pipeline", schedule=schedule)):
        assert families.families.difference(found, expected) < 1e-12


def averaged(backend, folder, **arguments):
    """Train with averages, by which validations are computed; return the last one."""
    torch.set_num_threads(1)
    model = make(Decoder)
    with Trainer(backend=backend, devices="cpu", seed=3, progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = ExponentialMovingAverage(0.5)
        loaders = {"validation": DataLoader(rows(5), batch_size=4)}
        if folder is not None:
            loaders["checkpoint"] = Checkpoints(folder, every_steps=1)
        loader = DataLoader(rows(8), batch_size=4)
        records = trainer.fit(
            model, optimizer, loader, step=step, callbacks=[average], epochs=3, **loaders, **arguments
        )
        return dict(records[-1].val) if records else None


@pytest.mark.slow
def test_averages_are_those_of_one_device_also_when_resumed(pair, tmp_path):
    expected = averaged("single", None)
    for found in pair.run(averaged, "pipeline", None):
        assert found == pytest.approx(expected, rel=1e-12)
    pair.run(lambda: averaged("pipeline", str(tmp_path), max_steps=3))
    for found in pair.run(lambda: averaged("pipeline", str(tmp_path), resume="auto")):
        assert found == pytest.approx(expected, rel=1e-12)


def with_adapters(backend):
    from peft import LoraConfig, get_peft_model

    model = make(Decoder)
    torch.manual_seed(4)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))
    return train(backend, model.double())


@pytest.mark.slow
def test_adapters_equal_one_device(pair):
    expected = with_adapters("single")
    for found in pair.run(with_adapters, "pipeline"):
        assert_same(found, expected)


def bert_losses(backend):
    """Return the loss of each step of a decoder of 8 layers with its own loss, as a user of PiPPy has it."""
    from transformers import BertConfig, BertLMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    nothing = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model = BertLMHeadModel(BertConfig(is_decoder=True, num_hidden_layers=8, **sizes, **nothing)).double()
    tokens = torch.randint(50, (8, 10))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
    options = {"pipeline": {"microbatches": 4}}
    with Trainer(backend=backend, devices="cpu", progress=False, options=options) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        records = trainer.fit(model, optimizer, loader, step=lambda m, b: m(**b).loss, epochs=3)
        return [record.train["loss"] for record in records]


@pytest.mark.slow
def test_the_loss_of_a_model_in_micro_batches_is_the_loss_of_its_batch(pair):
    # It was the sum of the micro-batches' losses: https://github.com/pytorch/PiPPy/issues/799
    # Transformers computes the loss in float32.
    expected = bert_losses("single")
    for found in pair.run(bert_losses, "pipeline"):
        assert found == pytest.approx(expected, rel=1e-6)


# -- Refusals, before the first step --


class Normalizing(Decoder):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def mix(self, x):
        return self.batch_norm(super().mix(x).mT).mT


class Deciding(Decoder):
    def mix(self, x):
        x = self.layers[0](x)
        return super().mix(x) if x.mean() > 0 else x


class Leaking(Decoder):
    def __init__(self):
        super().__init__()
        self.layers[0] = Leak()

    def mix(self, x):
        return super().mix(x) + self.layers[0].kept


class Leak(Block):
    def mix(self, x):
        self.kept = x * 2
        return super().mix(x)


class Boxing(Decoder):
    """A block returns an object that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layers[0] = Box()

    def mix(self, x):
        x = self.layers[0](x).kept
        for layer in self.layers[1:]:
            x = layer(x)
        return x


class Box(Block):
    def forward(self, x):
        self.kept = super().forward(x)
        return Holder(self.kept)


class Holder:
    def __init__(self, kept):
        self.kept = kept


class Reading(Decoder):
    """What a block returns comes back past operators of torch."""

    def mix(self, x):
        kept = self.layers[0](x).detach().numpy().copy()
        return super().mix(x) + torch.from_numpy(kept)


class Noting(Block):
    def mix(self, x):
        self.kept = self.up(x)
        return self.down(self.kept)


class Noted(Decoder):
    """A module within a block returns what is kept, and no hook collects it."""

    def __init__(self):
        super().__init__()
        self.layers[0] = Noting()


def penalized(model, batch):
    output = step(model, batch)
    output["loss"] = output["loss"] + sum(p.square().sum() for p in model.parameters())
    return output


class Keeping(Decoder):
    def __init__(self):
        super().__init__()
        self.layers[0] = Leak()


def peeking(model, batch):
    output = step(model, batch)
    return output | {"loss": output["loss"] + model.layers[0].kept.mean()}


REFUSED = [
    (Normalizing, step, {}, ModelError, r"'batch_norm' \(BatchNorm1d\) normalizes over all samples"),
    (Deciding, step, {}, ModelError, "it decides by the numbers that 'layers.0' returns"),
    (Leaking, step, {}, ModelError, "that 'layers.0' makes is used outside of it"),
    (Keeping, peeking, {}, ModelError, "that 'layers.0' makes is used outside of it"),
    (Noted, peeking, {}, ModelError, "in stage 1 what 'layers.0' of stage 0 keeps of its 'up'"),
    (Reading, step, {}, ModelError, "it decides by the numbers that 'layers.0' returns"),
    (Decoder, penalized, {}, StepError, "the step reads the parameter 'layers.0.*' of stage 0 in stage 1"),
    (Decoder, step, {"schedule": "LoopedBFS", "stages_per_rank": 5}, ConfigError, "the step calls 8 blocks"),
    (Decoder, step, {"microbatches": 9}, StepError, "has 8 samples, and .* 9 micro-batches"),
    (Decoder, step, {"cuts": ["layer.1"]}, ConfigError, "names 'layer.1', which is no module"),
    (Decoder, step, {"schedule": "DualPipeV", "microbatches": 2}, ConfigError, "cannot be made of 2"),
    (Boxing, step, {}, ModelError, r"'layers.0' \(Box\) returns Holder beside tensors"),
    (Decoder, step, {"cuts": ["layers.1", "layers.1"]}, ConfigError, "each once, as in .* got"),
    (Decoder, step, {"schedule": "1f1b"}, ConfigError, "must be one of 'GPipe', '1F1B', .* got '1f1b'"),
    (Decoder, step, {"cuts": ["layers.1", "layers.2"]}, TpError, "names 2 modules .* need 1"),
    (Decoder, step, {"cuts": "own"}, DisagreementError, "ranks disagree on"),
    (Decoder, step, {"data": "fsdp"}, TpError, "data ranks, and all 2 ranks hold one model"),
    (Decoder, step, {"data": "shard"}, ConfigError, "must be one of 'ddp', 'fsdp', got 'shard'"),
]


def refusals():
    """Return what is said of each case; in one call, as a rank starts slowly."""
    torch.set_num_threads(1)
    said = []
    for model_class, body, options, *_ in REFUSED:
        model = make(model_class)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        own = {"cuts": [f"layers.{3 + int(os.environ['RANK'])}"]}
        chosen = {
            "backend": "pipeline",
            "options": {"pipeline": own if options.get("cuts") == "own" else options},
        }
        with Trainer(devices="cpu", seed=0, progress=False, **chosen) as trainer:
            try:
                trainer.fit(model, optimizer, DataLoader(rows(8), batch_size=8), step=body, epochs=1)
            except TpError as error:
                same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
                said.append((type(error), str(error), same))
            else:
                said.append((None, "nothing", False))
    return said


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_with_a_reason(pair):
    for said in pair.run(refusals):
        for (*_, kind, message), (found, text, is_same) in zip(REFUSED, said, strict=True):
            assert issubclass(found or type(None), kind), text
            with pytest.raises(kind, match=message):
                raise kind(text)
            assert is_same


class Marked(Decoder):
    """One rank's shard of a parameter, as a layer of tp-shard has it."""

    def __init__(self):
        super().__init__()
        self.layers[0].up.weight.tp_sharded = True


COMBINED = [
    (Marked, torch.optim.SGD, "pipeline", {}, "split parameters, .* or the option weights='shard' for"),
    (Decoder, torch.optim.Muon, "pipeline", {}, "Muon computes with whole matrices, or with all of them"),
    (
        Decoder,
        torch.optim.SGD,
        "context",
        {"weights": "pipeline"},
        "are each to take all 2 ranks",
    ),
]


def refused_combinations():
    """Return what is said of each combination, and whether a step began."""
    torch.set_num_threads(1)
    said = []
    for model_class, optimizer_class, backend, options, _ in COMBINED:
        began = []

        def noted(model, batch, began=began):
            began.append(batch)
            return step(model, batch)

        model = make(model_class)
        trained = [p for p in model.parameters() if p.dim() == 2]
        with Trainer(backend=backend, devices="cpu", progress=False, options={backend: options}) as trainer:
            try:
                optimizer = optimizer_class(trained)
                trainer.fit(model, optimizer, DataLoader(rows(8), batch_size=8), step=noted)
            except TpError as error:
                said.append((str(error), len(began)))
            else:
                said.append(("nothing", len(began)))
    return said


def test_what_stages_do_not_go_with_is_refused_before_a_step(pair):
    for said in pair.run(refused_combinations):
        for (*_, message), (text, steps) in zip(COMBINED, said, strict=True):
            assert re.search(message, text), text
            assert steps == 0
