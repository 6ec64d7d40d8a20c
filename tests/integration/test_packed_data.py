"""Packed rows and token budgets in the trainer: the same weights on any number of ranks, resumed anywhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_core.errors import ModelError
from tp_data import Loader, Packed, Stream, TokenBudget
from tp_testing import run_ranks
from tp_trainer import Checkpoints, Limits, Trainer


class Decoder(nn.Module):
    """One layer of causal attention to what the mask shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.head = nn.Embedding(32, 8), nn.Embedding(64, 8), nn.Linear(8, 32)
        self.double()

    def forward(self, input_ids, position_ids=None, attention_mask=None, labels=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1))[None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None  # of padding, behind all tokens: a causal model does not see it
        mask = None if attention_mask is None else attention_mask[:, 0]
        hidden = hidden + F.scaled_dot_product_attention(hidden, hidden, hidden, mask, is_causal=mask is None)
        logits = self.head(hidden)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


BATCHERS = {
    "best-fit": lambda: Packed(32, 6, window=20),
    "concat": lambda: Packed(32, 4, how="concat"),
    "budget": lambda: TokenBudget(200, window=20),
}


def samples():
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(60):
        ids = torch.randint(1, 32, (int(torch.randint(2, 40, (), generator=generator)),), generator=generator)
        labels = ids.clone()
        labels[: len(ids) // 3] = -100  # a prompt: batches have different numbers of labels
        found.append({"input_ids": ids, "labels": labels})
    return found


def fit(
    batcher,
    folder=None,
    *,
    backend="single",
    max_steps=8,
    resume=None,
    accumulate=1,
    step=None,
    devices="cpu",
):
    model = Decoder()
    loader = Loader(Stream(samples(), shuffle=True, repeat=True), BATCHERS[batcher]())
    with Trainer(backend=backend, devices=devices, progress=False, accumulate=accumulate) as trainer:
        history = trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            loader,
            step=step or (lambda model, batch: model(**batch)),
            epochs=4,
            limits=Limits(max_steps=max_steps, steps_per_epoch=4 * accumulate),
            checkpoint=None if folder is None else Checkpoints(folder),
            resume=resume,
        )
    return {name: p.detach().clone() for name, p in model.named_parameters()}, history[-1].train["loss"]


def assert_same(found, expected):
    assert found[1] == pytest.approx(expected[1], rel=1e-9)
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-10)


def by_hand(batcher):
    """Train with means over the labels of whole batches, without the trainer."""
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = iter(Loader(Stream(samples(), shuffle=True, repeat=True), BATCHERS[batcher]()))
    for _ in range(8):
        model(**next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("batcher", BATCHERS)
def test_a_run_has_the_steps_of_a_plain_loop(batcher):
    weights, _ = fit(batcher)
    for name, value in by_hand(batcher).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)


def test_accumulated_batches_are_a_mean_over_all_their_labels():
    weights, _ = fit("best-fit", accumulate=2, max_steps=3)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = iter(Loader(Stream(samples(), shuffle=True, repeat=True), BATCHERS["best-fit"]()))
    for _ in range(3):
        pair = [next(batches), next(batches)]
        total = sum(batch.weight() for batch in pair)
        sum(model(**batch) * batch.weight() / total for batch in pair).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("batcher", ["best-fit", "budget"])
def test_a_run_continues_with_what_was_held_back(batcher, tmp_path):
    expected = fit(batcher)
    fit(batcher, tmp_path, max_steps=3)
    assert_same(fit(batcher, tmp_path, resume="auto"), expected)


def step_on_logits(model, batch):
    """Make the loss of the whole batch's logits: dp-gather joins these, and not losses of parts."""
    logits = model(batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask"))
    return {"loss": F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])}


@pytest.mark.parametrize(
    ("backend", "batcher"),
    [
        ("tuple", "best-fit"),
        ("dp-gather", "budget"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("tuple", "budget"), ("tuple", "concat"), ("dp-gather", "best-fit")]
        ),
    ],
)
def test_devices_of_one_process_take_the_steps_of_one_device(backend, batcher, tmp_path):
    devices = ["cpu", "cpu"]
    expected = fit(batcher, step=step_on_logits)
    assert_same(fit(batcher, backend=backend, devices=devices, step=step_on_logits), expected)
    fit(batcher, tmp_path, max_steps=3, step=step_on_logits)
    found = fit(batcher, tmp_path, backend=backend, devices=devices, resume="auto", step=step_on_logits)
    assert_same(found, expected)


def fit_epochs(folder, *, backend="single", max_steps=None, resume=None, batcher="budget"):
    """Train three epochs of as many batches as each has."""
    model = Decoder()
    loader = Loader(Stream(samples(), shuffle=True), BATCHERS[batcher](), costs=folder / "costs")
    with Trainer(backend=backend, devices="cpu", progress=False, accumulate=2) as trainer:
        history = trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            loader,
            step=lambda model, batch: model(**batch),
            epochs=3,
            limits=Limits(max_steps=max_steps),
            checkpoint=Checkpoints(folder),
            resume=resume,
        )
    return {name: p.detach().clone() for name, p in model.named_parameters()}, history[-1]


@pytest.mark.parametrize("batcher", ["budget", pytest.param("best-fit", marks=pytest.mark.slow)])
def test_epochs_have_as_many_batches_as_the_costs_make(batcher, tmp_path):
    weights, record = fit_epochs(tmp_path / "whole", batcher=batcher)
    model, steps = Decoder(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = Loader(Stream(samples(), shuffle=True), BATCHERS[batcher](), costs=tmp_path / "whole" / "costs")
    for _ in range(3):
        expected = len(loader)
        batches = list(loader)
        assert len(batches) == expected
        for step in [batches[i : i + 2] for i in range(0, expected, 2)]:
            total = sum(batch.weight() for batch in step)
            sum(model(**batch) * batch.weight() / total for batch in step).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert record.steps == steps
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)
    tokens = sum(len(sample["input_ids"]) for sample in samples())
    padded = sum(batch["input_ids"].numel() for batch in batches)
    assert record.data["tokens"] == tokens
    assert record.data["fill"] == pytest.approx(tokens / padded)
    assert f"fill={tokens / padded:.3g}" in str(record)
    assert {"labels", "tokens_per_s", "wait_s", "skipped"} < set(record.data)
    fit_epochs(tmp_path / "cut", batcher=batcher, max_steps=steps // 2)
    again, _ = fit_epochs(tmp_path / "cut", batcher=batcher, resume="auto")
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_ranks_have_the_epochs_and_the_record_of_one(tmp_path):
    expected, record = fit_epochs(tmp_path / "one")
    for weights, theirs in run_ranks(lambda: fit_epochs(tmp_path / "two", backend="ddp"), 2):
        assert theirs.steps == record.steps
        assert {n: theirs.data[n] for n in ("tokens", "labels")} == {
            n: record.data[n] for n in ("tokens", "labels")
        }
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "batcher"),
    [
        (3, "best-fit"),
        (6, "concat"),
        (3, "budget"),
        *(pytest.param(2, batcher, marks=pytest.mark.nightly) for batcher in BATCHERS),
        *(pytest.param(4, batcher, marks=pytest.mark.nightly) for batcher in BATCHERS),
        pytest.param(6, "budget", marks=pytest.mark.nightly),
    ],
)
def test_any_number_of_ranks_takes_the_same_steps(batcher, ranks):
    expected = fit(batcher)
    for found in run_ranks(lambda: fit(batcher, backend="ddp"), ranks):
        assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("batcher", BATCHERS)
def test_ranks_change_in_the_middle_of_an_epoch(batcher, tmp_path):
    expected = fit(batcher)
    run_ranks(lambda: fit(batcher, tmp_path, backend="ddp", max_steps=3), 3)
    run_ranks(lambda: fit(batcher, tmp_path, backend="ddp", max_steps=6, resume="auto"), 2)
    assert_same(fit(batcher, tmp_path, resume="auto"), expected)


def test_a_step_that_mixes_documents_up_is_refused_before_it_is_taken():
    def step(model, batch):
        return model(batch["input_ids"], labels=batch["labels"])

    with pytest.raises(ModelError, match="this model mixes up the documents of packed rows"):
        fit("best-fit", step=step)
