"""Losses that compare samples with each other, over the samples of all ranks."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests import reference_training


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor([1.0]))
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


def train(weighted=False, n=17, **where):
    """The last batch has one pair: on two ranks one of them has a stand-in."""
    model = Towers()
    with Trainer(**({"seed": 0, "devices": "cpu", "progress": False} | where)) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        step = functools.partial(contrast, trainer, weighted=weighted)
        loader, few = DataLoader(pairs(n), batch_size=8), DataLoader(pairs(7), batch_size=3)
        history = trainer.fit(model, optimizer, loader, step=step, epochs=2, validation=few)
        losses = [(r.train["loss"], r.val["loss"]) for r in history]
        found = {name: p.detach() for name, p in model.named_parameters()}
        return losses, {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in found.items()}


def train_own_loop():
    model = Towers()
    with Trainer(seed=0, devices="cpu", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        prepared, optimizer, loader = trainer.prepare(model, optimizer, DataLoader(pairs(17), batch_size=8))
        step = functools.partial(contrast, trainer)
        reference_training.train(prepared, optimizer, loader, step, backward=trainer.backward)
        return [], {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "body",
    [train, functools.partial(train, weighted=True), train_own_loop],
    ids=["fit", "fit, weighted", "own loop"],
)
def test_a_contrastive_loss_is_that_of_one_device(two_ranks, body):
    losses, expected = body()
    for found_losses, found in two_ranks.run(body):
        for mine, whole in zip(found_losses, losses, strict=True):
            assert mine[0] == pytest.approx(whole[0], rel=1e-9)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_it_is_that_of_one_device_on_sharded_models():
    losses, expected = train()
    for found_losses, found in run_ranks(functools.partial(train, backend="fsdp"), 2):
        # Evaluation joins a last batch with fewer samples than ranks to the one before it.
        assert [mine[0] for mine in found_losses] == pytest.approx([whole[0] for whole in losses], rel=1e-9)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
@pytest.mark.parametrize("n_devices", [2, 3])
def test_it_is_that_of_one_device_on_devices_of_one_process(backend, weighted, n_devices):
    losses, expected = train(weighted)
    found_losses, found = train(weighted, backend=backend, devices=["cpu"] * n_devices)
    assert found_losses == pytest.approx(np.array(losses), rel=1e-9)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


def in_parts(step, batch):
    """Run a step on two devices of this process."""
    with Trainer(backend="tuple", devices=["cpu", "cpu"], progress=False) as trainer:
        model, loader = trainer.prepare(nn.Linear(1, 1), DataLoader(batch, batch_size=len(batch)))
        return trainer.run(functools.partial(step, trainer), model, next(iter(loader)))


def rows(n):
    return torch.arange(float(n)).reshape(n, 1)


def test_parts_see_all_rows_in_the_order_of_the_batch_as_often_as_they_like():
    seen = []

    def step(trainer, model, batch):
        first, twice = trainer.all_gather(batch), trainer.all_gather(2 * batch)
        seen.append((first.flatten().tolist(), twice.flatten().tolist()))
        return first.sum()

    assert in_parts(step, rows(5)).item() == 10
    assert seen == [([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 4.0, 6.0, 8.0])] * 2


def test_a_part_that_does_not_come_is_not_waited_for():
    def absent(trainer, model, batch):
        return trainer.all_gather(batch).sum() if 0 in batch else batch.sum()

    with pytest.raises(StepError, match="called for some parts of the batch, and not for others"):
        in_parts(absent, rows(5))

    def broken(trainer, model, batch):
        if 0 not in batch:
            raise ZeroDivisionError("of this part")
        return trainer.all_gather(batch).sum()

    with pytest.raises(ZeroDivisionError, match="of this part"):
        in_parts(broken, rows(5))


def test_parts_whose_rows_do_not_go_together_say_so():
    def step(trainer, model, batch):
        return trainer.all_gather(batch.repeat(1, len(batch))).sum()

    with pytest.raises(StepError, match=r"do not go together: \(n, 2\) .* and \(n, 3\)"):
        in_parts(step, rows(5))


def test_gathering_parts_have_the_same_bits_in_a_new_thread():
    """Autograd numbers from 0 there, as in a new process: the nodes of all parts have equal numbers."""
    where = {"backend": "tuple", "devices": ["cpu"] * 3}
    with ThreadPoolExecutor(1) as thread:
        losses, weights = thread.submit(train, **where).result(800)
    again, found = train(**where)
    assert again == losses
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_parts_that_run_one_after_the_other_do_not_wait():
    def step(trainer, model, batch):
        return trainer.all_gather(batch).sum()

    with BaseTorchFunctionMode(), pytest.raises(StepError, match="they run one after the other"):
        in_parts(step, rows(5))


def test_outside_of_a_step_there_are_no_parts_to_gather():
    with Trainer(backend="tuple", devices=["cpu", "cpu"], progress=False) as trainer:
        trainer.prepare(nn.Linear(1, 1))
        with pytest.raises(StepError, match="call all_gather\\(\\) in a step"):
            trainer.all_gather(rows(2))


def test_what_is_gathered_must_have_rows():
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.prepare(nn.Linear(1, 1))
        for wrong, what in ((torch.tensor(1.0), "a scalar"), ([1.0], "list")):
            with pytest.raises(StepError, match=f"first dimension over samples, got {what}"):
                trainer.all_gather(wrong)


def _nan_of_a_stand_in():
    """Return whether weights are finite after the loss of a stand-in, in the third batch, was NaN."""
    finite = []
    for gathers in (False, True):
        model, met = nn.Linear(5, 1).double(), []
        with Trainer(seed=0, devices="cpu", progress=False) as trainer:

            def step(model, batch, gathers=gathers, trainer=trainer, met=met):
                met.append(len(met))
                rows = model(batch[0])
                loss = (trainer.all_gather(rows) if gathers else rows).square().mean()
                return loss * torch.nan if len(met) == 3 and trainer.session.rank else loss

            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            trainer.fit(model, optimizer, DataLoader(pairs(9), batch_size=4), step=step)
        finite.append(model.weight.isfinite().all().item())
    return finite


def test_a_stand_in_whose_loss_is_nan_poisons_no_rank(two_ranks):
    assert two_ranks.run(_nan_of_a_stand_in) == [[True, True]] * 2
