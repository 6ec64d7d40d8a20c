"""Losses that compare samples with each other, over the samples of all ranks."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_core.testing import run_ranks
from tp_trainer import Trainer


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, left, right):
        return (
            functional.normalize(self.left(left)),
            functional.normalize(self.right(right)) * self.scale.exp(),
        )


def pairs(n):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(n, k, dtype=torch.float64, generator=generator) for k in (5, 4)))


def contrast(trainer, model, batch, weighted=False):
    left, right = (trainer.all_gather(rows) for rows in model(*batch))
    scores, own = left @ right.T, torch.arange(len(left))
    loss = (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2
    return {"loss": loss, "weight": len(batch[0])} if weighted else loss


def train(weighted=False, n=17):
    """The last batch has one pair: on two ranks one of them has a stand-in."""
    model = Towers()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        step = functools.partial(contrast, trainer, weighted=weighted)
        loader, few = DataLoader(pairs(n), batch_size=8), DataLoader(pairs(7), batch_size=3)
        history = trainer.fit(model, optimizer, loader, step=step, epochs=2, val_loader=few)
        losses = [(r.train["loss"], r.val["loss"]) for r in history]
        return losses, {name: p.detach() for name, p in model.named_parameters()}


def train_own_loop():
    model = Towers()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        prepared, optimizer, loader = trainer.prepare(model, optimizer, DataLoader(pairs(17), batch_size=8))
        for batch in loader:
            optimizer.zero_grad()
            trainer.backward(contrast(trainer, prepared, batch))
            optimizer.step()
        return [], {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "body",
    [train, functools.partial(train, weighted=True), train_own_loop],
    ids=["fit", "fit, weighted", "own loop"],
)
def test_a_contrastive_loss_is_that_of_one_device(body):
    losses, expected = body()
    for found_losses, found in run_ranks(body, 2):
        for mine, whole in zip(found_losses, losses, strict=True):
            assert mine[0] == pytest.approx(whole[0], rel=1e-9)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


def test_what_is_gathered_must_have_rows():
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.prepare(nn.Linear(1, 1))
        for wrong, what in ((torch.tensor(1.0), "a scalar"), ([1.0], "list")):
            with pytest.raises(StepError, match=f"first dimension goes over samples, got {what}"):
                trainer.all_gather(wrong)


def _nan_of_a_stand_in():
    """Return whether weights are finite after the loss of a stand-in, in the third batch, was NaN."""
    finite = []
    for gathers in (False, True):
        model = nn.Linear(5, 1).double()
        with Trainer(seed=0, devices="cpu", progress=False) as trainer:

            def step(model, batch, gathers=gathers, trainer=trainer):
                rows = model(batch[0])
                loss = (trainer.all_gather(rows) if gathers else rows).square().mean()
                return loss if trainer.session.share.samples else loss * torch.nan

            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            trainer.fit(model, optimizer, DataLoader(pairs(9), batch_size=4), step=step)
        finite.append(model.weight.isfinite().all().item())
    return finite


def test_a_stand_in_whose_loss_is_nan_poisons_no_rank():
    assert run_ranks(_nan_of_a_stand_in, 2) == [[True, True]] * 2
