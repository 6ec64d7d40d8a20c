"""Jobs that were written for other trainers: as by hand on every backend, interrupted and resumed."""

import functools
import multiprocessing

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tp_trainer import Checkpoints, FunctionMetric, SchedulerOptions, Trainer, Validation
from tp_trainer.callbacks import EarlyStopping, ExponentialMovingAverage

EPOCHS = 3
PLACES = {
    "single": {"devices": "cpu"},
    "tuple": {"devices": ["cpu", "cpu"], "backend": "tuple"},
    "dp-gather": {"devices": ["cpu", "cpu"], "backend": "dp-gather"},
}
ON_RANKS = {name: {"devices": "cpu", "backend": name} for name in ("ddp", "fsdp", "shard")}


def on_shards(where, model, plan):
    """Split a model over the ranks where the backend is for that, as ``plan`` of it says."""
    if where.get("backend") != "shard":
        return model
    import tp_shard as ts

    if not torch.distributed.is_initialized():
        ts.distributed.init_process_group(-1)
    return ts.parallelize(model, plan(ts, model))


def joined(state):
    return torch.cat([state[name].detach().flatten() for name in sorted(state)])


def weights_of(trainer, model):
    """Return the whole weights of a model, wherever its parts are."""
    return joined(trainer.session.model_state(model))


# -- texts: dicts as batches, groups of parameters, warm-up by steps, accumulation, clipping ------------


def texts(n, first=0):
    """Sentences of a class each; an odd number, so that no last batch is full."""
    generator = torch.Generator().manual_seed(first)
    tokens = torch.randint(5, 40, (n, 12), generator=generator)
    labels = (tokens[:, :4].sum(1) > 88).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def make_bert(where):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=2, **sizes, **off)
    model = transformers.BertForSequenceClassification(config).double()
    model = on_shards(where, model, lambda ts, model: ts.plans.auto(model, verbose=False))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return model, optimizer, warmup


def classify(model, batch):
    output = model(**batch)
    scores = output.logits.softmax(1)[:, 1]
    rows = {"f1": (batch["labels"], scores > 0.5), "auroc": (batch["labels"], scores)}
    return {"loss": output.loss, "weight": len(batch["labels"]), **rows}


def loader_of(items, workers=0, **options):
    return DataLoader(items, batch_size=8, num_workers=workers, **options)


def text_job(where, *, folder=None, max_steps=None, workers=0):
    from sklearn.metrics import f1_score, roc_auc_score

    model, optimizer, warmup = make_bert(where)
    with Trainer(seed=0, accumulate=2, progress=False, **where) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            loader_of(texts(35), workers, shuffle=True),
            step=classify,
            epochs=EPOCHS,
            validation=Validation(
                loader_of(texts(33, 1)),
                metrics={"f1": FunctionMetric(f1_score), "auroc": FunctionMetric(roc_auc_score)},
            ),
            scheduler=SchedulerOptions(warmup, every="step"),
            clip_norm=0.5,
            max_steps=max_steps,
            checkpoint=folder and Checkpoints(folder, every_steps=2, best="val_f1", mode="max"),
            resume=folder and "auto",
        )
        weights = weights_of(trainer, model)
    return weights, [record.train["loss"] for record in history], history[-1].val


@functools.cache
def text_job_by_hand():
    from sklearn.metrics import f1_score, roc_auc_score

    model, optimizer, warmup = make_bert({})
    losses = []
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        loader = trainer.prepare(loader_of(texts(35), shuffle=True))  # for its order alone
        for _ in range(EPOCHS):
            batches = list(loader)
            losses.append(0.0)
            for first in range(0, len(batches), 2):
                together = batches[first : first + 2]
                n = sum(len(batch["labels"]) for batch in together)
                optimizer.zero_grad()
                for batch in together:
                    loss = model(**batch).loss * len(batch["labels"])
                    (loss / n).backward()
                    losses[-1] += loss.item() / 35
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                warmup.step()
    with torch.no_grad():
        scores = torch.cat([model(**b).logits.softmax(1)[:, 1] for b in loader_of(texts(33, 1))])
    labels = [int(item["labels"]) for item in texts(33, 1)]
    found = {"f1": f1_score(labels, scores > 0.5), "auroc": roc_auc_score(labels, scores)}
    return joined(model.state_dict()), losses, found


def check_text_job(found):
    weights, losses, metrics = found
    expected, by_hand, of_sklearn = text_job_by_hand()
    assert losses == pytest.approx(by_hand, rel=1e-9)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)
    assert {name: metrics[name] for name in of_sklearn} == pytest.approx(of_sklearn, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.nightly if p == "tuple" else ()) for p in PLACES]
)
def test_a_classifier_of_texts_is_as_by_hand_and_resumed(tmp_path, place):
    whole = text_job(PLACES[place])
    check_text_job(whole)
    text_job(PLACES[place], folder=tmp_path, max_steps=4, workers=1)
    parts = text_job(PLACES[place], folder=tmp_path, workers=1)
    assert torch.equal(parts[0], whole[0])
    assert parts[1:] == whole[1:]


def _text_job_on_a_rank(where, folder):
    whole = text_job(where)
    multiprocessing.current_process()._config["daemon"] = False  # ranks of tests may not have workers else
    text_job(where, folder=folder, max_steps=4, workers=1)
    parts = text_job(where, folder=folder, workers=1)
    return whole, bool(torch.equal(parts[0], whole[0])) and parts[1:] == whole[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p == "fsdp" else pytest.mark.nightly) for p in ON_RANKS]
)
def test_a_classifier_of_texts_is_as_by_hand_on_two_ranks(two_ranks, tmp_path, place):
    for found, is_resumed in two_ranks.run(_text_job_on_a_rank, ON_RANKS[place], tmp_path):
        check_text_job(found)
        assert is_resumed


# -- pictures: mixed pairs, smoothed labels, one cycle, averaged weights, early stopping ----------------


def pictures(n, first=0):
    generator = torch.Generator().manual_seed(first)
    x = torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = (x.mean((1, 2, 3)) > 0).long()
    pair = torch.randperm(n, generator=generator)
    mix = torch.rand(n, 1, 1, 1, generator=generator, dtype=torch.float64)
    return list(zip(mix * x + (1 - mix) * x[pair], y, y[pair], mix.flatten(), strict=True))


def mixed_step(model, batch):
    x, mine, other, mix = batch
    scores = model(x)
    losses = [F.cross_entropy(scores, y, label_smoothing=0.1, reduction="none") for y in (mine, other)]
    right = (scores.argmax(1) == mine).double().mean()
    return {"loss": (mix * losses[0] + (1 - mix) * losses[1]).mean(), "right": right}


def picture_job(where, *, folder=None, max_steps=None, workers=0):
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)]
    model = nn.Sequential(*body).double()
    model = on_shards(where, model, lambda ts, _: {"4": ts.Column(gather_output=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15)
    average = ExponentialMovingAverage(0.8)
    with Trainer(seed=0, progress=False, **where) as trainer:
        history = trainer.fit(
            model,
            optimizer,
            loader_of(pictures(37), workers, shuffle=True),
            step=mixed_step,
            epochs=EPOCHS,
            validation=loader_of(pictures(17, 1)),
            scheduler=SchedulerOptions(cycle, every="step"),
            max_steps=max_steps,
            callbacks=[average, EarlyStopping("val_loss", patience=1)],
            checkpoint=folder and Checkpoints(folder, every_steps=3, best="val_loss"),
            resume=folder and "auto",
        )
        with average.in_place_of(model):
            averaged = weights_of(trainer, model).clone()
        return weights_of(trainer, model), averaged, history[-1].val


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p == "tuple" else pytest.mark.nightly) for p in PLACES]
)
def test_a_classifier_of_pictures_is_that_of_one_device_and_resumed(tmp_path, place):
    whole, expected = picture_job(PLACES[place]), picture_job(PLACES["single"])
    for found, wanted in zip(whole[:2], expected[:2], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    picture_job(PLACES[place], folder=tmp_path, max_steps=7, workers=1)
    parts = picture_job(PLACES[place], folder=tmp_path, workers=1)
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert parts[2] == whole[2]


def _picture_job_on_a_rank(where, folder):
    whole = picture_job(where)
    multiprocessing.current_process()._config["daemon"] = False  # ranks of tests may not have workers else
    picture_job(where, folder=folder, max_steps=7, workers=1)
    parts = picture_job(where, folder=folder, workers=1)
    return whole, all(torch.equal(a, b) for a, b in zip(whole[:2], parts[:2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=() if p == "ddp" else pytest.mark.nightly) for p in ON_RANKS]
)
def test_a_classifier_of_pictures_is_that_of_one_device_on_two_ranks(two_ranks, tmp_path, place):
    expected = picture_job(PLACES["single"])
    for found, is_resumed in two_ranks.run(_picture_job_on_a_rank, ON_RANKS[place], tmp_path):
        assert is_resumed
        for mine, wanted in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)
