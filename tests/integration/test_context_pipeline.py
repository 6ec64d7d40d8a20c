"""Stages on slices of sequences train as one device does, and are saved as on every backend."""

import importlib
import re
import warnings
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader
from tp_core.errors import TpError
from tp_data import Loader, Packed, Stream
from tp_testing import RankPool
from tp_trainer import Checkpoints, FunctionMetric, Limits, Trainer, Validation
from tp_trainer.callbacks import ExponentialMovingAverage

from tests.integration import context_families, pipeline_families


def prepare():
    """Import what names types before they have other names, as they do for transformers in float64."""
    importlib.import_module("tp_context._session")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def four():
    with RankPool(4, setup=prepare) as ranks:
        yield ranks


def step(model, batch):
    output = model(**batch)
    return {"loss": output.loss, "error": (output.logits.argmax(-1) != batch["labels"])[..., None]}


def mean(errors):
    return float(errors.mean())


def make_trainer(stages, accumulate=1, **context):
    warnings.simplefilter("ignore")
    both = {"context": {"context": 2, "weights": "pipeline"} | context, "pipeline": stages}
    backend, options = ("single", {}) if stages is None else ("context", both)
    settings = {"devices": "cpu", "progress": False, "seed": 0, "accumulate": accumulate}
    return Trainer(backend=backend, options=options, **settings)


def make_model(name, dtype):
    with patch.object(pipeline_families, "LAYERS", 4):
        return pipeline_families.make_model(name, dtype)


def train(
    name, stages=None, *, dtype=torch.float64, accumulate=1, attention="all-gather", epochs=1, **arguments
):
    """Train on uneven tokens, and validate by averages; return losses, errors and weights."""
    prepare()
    with context_families.all_in_float64() if dtype is torch.float64 else nullcontext():
        model = make_model(name, dtype)
        rows = pipeline_families.rows_of(name, dtype)[:13]
        metrics = {"error": FunctionMetric(mean)}
        with make_trainer(stages, accumulate, attention=attention) as trainer:
            # Not Adam: it divides the biases of GPT-2's keys, which have no gradient but rounding.
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            history = trainer.fit(
                model,
                optimizer,
                DataLoader(rows, batch_size=8),
                step=step,
                validation=Validation(DataLoader(rows[5:10], batch_size=4), metrics=metrics),
                epochs=epochs,
                clip_norm=0.5,
                callbacks=[ExponentialMovingAverage(0.5)],
                **arguments,
            )
            state = {n: t.clone() for n, t in trainer.session.model_state(model).items()}
    numbers = [(record.train["loss"], record.val["loss"], record.val["error"]) for record in history]
    return numbers, state


IN_FLOAT32 = {"dtype": torch.float32, "attention": "ring"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "settings", "tolerance"),
    [
        # Of some samples a slice has no label that counts, of others neither slice has.
        ("llama", {"ranks": 2, "microbatch_size": 1}, {"accumulate": 2}, 1e-12),
        ("gpt2", {"schedule": "InterleavedZeroBubble", "microbatches": 3}, IN_FLOAT32, 1e-6),
    ],
)
def test_stages_on_slices_equal_one_device(four, name, stages, settings, tolerance):
    expected = train(name, **settings)
    for found in four.run(partial(train, name, stages, **settings)):
        assert context_families.difference(found, expected) < tolerance


def on_packed_rows(stages=None):
    """Train adapters on packed documents; return losses and weights."""
    from peft import LoraConfig, get_peft_model

    prepare()
    warnings.simplefilter("ignore")
    lengths = (9, 14, 30, 4, 21, 8, 17, 12)
    texts = [{"input_ids": [1 + (7 * n + i * i) % 60 for i in range(n)]} for n in lengths]
    with context_families.all_in_float64():
        chosen = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(make_model("llama", torch.float64), chosen).double()
        with make_trainer(stages) as trainer:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
            loader = Loader(Stream(texts), Packed(32, rows=2, arguments="positions"))
            limits = Limits(steps_per_epoch=2)
            history = trainer.fit(
                model, optimizer, loader, step=lambda m, b: m(**b).loss, epochs=1, limits=limits
            )
            return [history[0].train["loss"]], dict(trainer.session.model_state(model))


@pytest.mark.slow
def test_adapters_learn_packed_documents_as_on_one_device(four):
    expected = on_packed_rows()
    for found in four.run(on_packed_rows, {"ranks": 2, "microbatches": 2}):
        assert context_families.difference(found, expected) < 1e-12


def begun(stages, folder):
    train("llama", stages, epochs=2, checkpoint=Checkpoints(folder, every_steps=1), max_steps=2)


def ended(stages, folder):
    return train("llama", stages, epochs=2, checkpoint=Checkpoints(folder, every_steps=1), resume="auto")


@pytest.mark.slow
def test_a_run_of_stages_on_slices_is_resumed_on_one_device_and_back(four, tmp_path):
    expected, stages = train("llama", epochs=2)[1], {"ranks": 2}
    four.run(begun, stages, str(tmp_path / "there"))
    begun(None, str(tmp_path / "back"))
    for found in [ended(None, str(tmp_path / "there")), *four.run(ended, stages, str(tmp_path / "back"))]:
        torch.testing.assert_close(found[1], expected, rtol=1e-9, atol=1e-10)


REFUSED = [
    ("vit", {}, {}, "pixel_values"),
    ("bloom", {}, {}, "cannot split the sequences of this model"),
    ("gpt2", {}, {"context": -1}, "are each to take all 4 ranks"),
    ("gpt2", {"data": "fsdp"}, {}, "data='fsdp' of backend 'pipeline' does not go with split sequences"),
    ("gpt2", {"weights": "shard"}, {}, "weights='shard' of backend 'pipeline' does not go with split"),
]


def refusals():
    """Return what is said of each combination, and whether the optimizer has made a step."""
    said = []
    for name, stages, context, _ in REFUSED:
        model = make_model(name, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(pipeline_families.rows_of(name, torch.float32)[:8], batch_size=8)
        try:
            with make_trainer(stages, **context) as trainer:
                trainer.fit(model, optimizer, loader, step=context_families.step, epochs=1)
        except TpError as error:
            said.append((str(error), len(optimizer.state)))
        else:
            said.append(("nothing", len(optimizer.state)))
    return said


def another(model, batch):
    return {"loss": model(**batch).logits[:, 0].mean(), "weight": 1}


def evaluated():
    """Return what is said of an evaluation by another step, and predictions for whole sequences."""
    model = make_model("gpt2", torch.float32)
    loader = DataLoader(pipeline_families.rows_of("gpt2", torch.float32)[:8], batch_size=8)
    with make_trainer({"ranks": 2}) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer.fit(model, optimizer, loader, step=context_families.step, epochs=1)
        rows = trainer.predict(model, loader, step=lambda model, batch: model(**batch).logits).collect()
        try:
            trainer.evaluate(model, loader, step=another)
        except TpError as error:
            return str(error), rows
    return "nothing", rows


@pytest.mark.slow
def test_what_stages_on_slices_do_not_go_with_is_refused_before_a_step(four):
    for said in four.run(refusals):
        for (*_, message), (text, steps) in zip(REFUSED, said, strict=True):
            assert re.search(message, text), text
            assert steps == 0


@pytest.mark.slow
def test_steps_that_were_not_compared_return_rows_alone(four):
    model = make_model("gpt2", torch.float32)
    rows = torch.utils.data.default_collate(pipeline_families.rows_of("gpt2", torch.float32)[:8])
    for text, found in four.run(evaluated):
        assert "the step returns 'loss', and is another one than the first" in text
        torch.testing.assert_close(found, model.eval()(**rows).logits, rtol=1e-4, atol=1e-5)
