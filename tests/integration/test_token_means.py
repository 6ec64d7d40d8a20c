"""A language model of transformers, with labels that do not count, leads where a loop by hand leads."""

import functools

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tp_testing import run_ranks
from tp_trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.needs("transformers")]

SAMPLES, BATCH_SIZE, EPOCHS = 22, 4, 2


class Texts(Dataset):
    """Texts of 12 tokens; of every third one, most labels are -100, and of every fifth one all."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(40, (SAMPLES, 12), generator=generator)
        lengths = torch.tensor([3 if i % 3 == 0 else 0 if i % 5 == 0 else 12 for i in range(SAMPLES)])
        self.labels = torch.where(torch.arange(12) < lengths[:, None], self.ids, -100)
        self.labels[16:18] = -100  # all that the second half of a batch has

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def make_model():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=12,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def loss_of_the_model(model, batch):
    return {"loss": model(**batch).loss, "weight": (batch["labels"][:, 1:] != -100).sum()}


def loss_of_the_step(model, batch):
    scores, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (labels != -100).sum()}


TOLERANCES = {loss_of_the_model: 1e-4, loss_of_the_step: 1e-9}  # transformers computes losses in float32


# Softmax is deaf to the bias of keys: its gradient is rounding, which an eps of 1e-8 would make steps of.
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)


@functools.cache
def by_hand(step, accumulate):
    """Train on what goes into each optimizer step as one batch."""
    model, texts = make_model(), Texts()
    optimizer = ADAMW(model.parameters())
    losses = []
    for _ in range(EPOCHS):
        total, tokens = 0.0, 0
        for first in range(0, SAMPLES, BATCH_SIZE * accumulate):
            part = slice(first, first + BATCH_SIZE * accumulate)
            optimizer.zero_grad()
            loss = step(model, {"input_ids": texts.ids[part], "labels": texts.labels[part]})["loss"]
            loss.backward()
            optimizer.step()
            counted = (texts.labels[part, 1:] != -100).sum().item()
            total, tokens = total + loss.item() * counted, tokens + counted
        losses.append(total / tokens)
    return losses, model.state_dict()


def train(step, accumulate, backend="auto", devices="cpu"):
    model = make_model()
    with Trainer(seed=0, progress=False, backend=backend, devices=devices, accumulate=accumulate) as trainer:
        history = trainer.fit(
            model,
            ADAMW(model.parameters()),
            DataLoader(Texts(), batch_size=BATCH_SIZE),
            validation=DataLoader(Texts(), batch_size=8),
            step=step,
            epochs=EPOCHS,
        )
        whole = trainer.evaluate(model, DataLoader(Texts(), batch_size=SAMPLES), step=step)
        assert history[-1].val["loss"] == pytest.approx(whole["loss"], rel=TOLERANCES[step])
        return [r.train["loss"] for r in history], model.state_dict()


def assert_as_by_hand(trained, step, accumulate):
    losses, state = by_hand(step, accumulate)
    tolerance = TOLERANCES[step]
    assert trained[0] == pytest.approx(losses, rel=tolerance)
    for name, tensor in state.items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("step", "backend", "devices", "accumulate"),
    [
        (loss_of_the_model, "single", "cpu", 2),
        (loss_of_the_model, "tuple", ["cpu", "cpu"], 1),
        (loss_of_the_step, "tuple", ["cpu", "cpu"], 2),
        (loss_of_the_model, "dp-gather", ["cpu", "cpu"], 2),
        (loss_of_the_step, "dp-gather", ["cpu", "cpu"], 1),
    ],
    ids=["single", "tuple", "tuple, loss in the step", "dp-gather", "dp-gather, loss in the step"],
)
def test_tokens_count_alike_on_every_backend(step, backend, devices, accumulate):
    assert_as_by_hand(train(step, accumulate, backend, devices), step, accumulate)


JOBS = [(step, accumulate) for step in TOLERANCES for accumulate in (1, 2)]


def _trained_on_ranks():
    return [train(step, accumulate) for step, accumulate in JOBS]


def test_tokens_count_alike_on_two_ranks():
    for outcomes in run_ranks(_trained_on_ranks, 2):
        for trained, (step, accumulate) in zip(outcomes, JOBS, strict=True):
            assert_as_by_hand(trained, step, accumulate)
