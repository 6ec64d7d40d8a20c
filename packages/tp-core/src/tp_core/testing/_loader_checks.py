"""A backend's loaders give each data rank its share, and each sample once."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tp_core._contracts._session import Session
from tp_core.testing._bodies import batch_loss, data, loss_of, prepared
from tp_core.testing._kit import PooledKit

__all__ = ["LoaderChecks"]

SAMPLES, BATCH_SIZE = 9, 4  # the last batch has one sample
Yielded = tuple[int, list[tuple[Any, Tensor]]]


class LoaderChecks(PooledKit):
    """The share of every batch; the last one has fewer samples than there may be ranks."""

    def test_in_training_every_rank_takes_every_step(self) -> None:
        for _, batches in self.everywhere(_yielded, True):
            assert len(batches) == 3

    @pytest.mark.parametrize("training", [True, False])
    def test_every_sample_counts_once(self, training: bool) -> None:
        found = self.everywhere(_yielded, training)
        shares = dict(found)  # ranks of one data rank read the same
        rows = [rows for batches in shares.values() for share, rows in batches if share.samples]
        assert sum(share.samples for batches in shares.values() for share, _ in batches) == SAMPLES
        x = data(SAMPLES).tensors[0]
        torch.testing.assert_close(_sorted(torch.cat(rows)), _sorted(x))

    def test_in_evaluation_every_rank_has_samples_of_every_batch(self) -> None:
        found = self.everywhere(_yielded, False)
        for _, batches in found:
            assert all(share.samples for share, _ in batches), "a sample would be met twice"
        assert len({len(batches) for _, batches in found}) == 1

    @pytest.mark.parametrize("samples", [1, 3])
    def test_evaluation_of_few_samples_neither_hangs_nor_counts_one_twice(self, samples: int) -> None:
        with torch.no_grad():
            expected = loss_of(batch_loss()(self.make_reference(), data(samples).tensors)).item()
        for found, loss in self.everywhere(_evaluated, samples, 2):
            assert found == samples
            assert loss == pytest.approx(expected, rel=1e-9)

    def test_ranks_may_evaluate_different_numbers_of_batches_of_their_own(self) -> None:
        for size, found, loss in self.everywhere(_evaluated_unevenly):
            parts = [data(_own_samples(rank)).tensors for rank in range(size)]
            with torch.no_grad():
                means = [loss_of(batch_loss()(self.make_reference(), part)).item() for part in parts]
            samples = [len(part[0]) for part in parts]
            assert found == sum(samples)
            total = sum(n * mean for n, mean in zip(samples, means, strict=True))
            assert loss == pytest.approx(total / sum(samples), rel=1e-9)

    def test_a_loader_that_is_split_already_is_taken_as_it_is(self) -> None:
        x = data(SAMPLES).tensors[0]
        for rows in self.everywhere(_unsharded):
            torch.testing.assert_close(_sorted(rows), _sorted(x))

    def test_evaluation_sees_each_sample_once(self) -> None:
        with torch.no_grad():
            expected = loss_of(batch_loss()(self.make_reference(), data(11).tensors)).item()
        for samples, loss in self.everywhere(_evaluated, 11, 5):
            assert samples == 11
            assert loss == pytest.approx(expected, rel=1e-9)


def _sorted(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].argsort()]


# -- on every rank --------------------------------------------------------------------------------


def _yielded(kit: LoaderChecks, training: bool) -> Yielded:
    """Return, for each batch, the share and the inputs that the step was given."""
    with prepared(kit) as (session, model):
        loader = DataLoader(data(SAMPLES), batch_size=BATCH_SIZE)
        batches = session.prepare_loader(loader, training=training)
        return session.data_rank, [(session.share, _inputs(session, model, batch)) for batch in batches]


def _inputs(session: Session, model: nn.Module, batch: Any) -> Tensor:
    """Return what the step is given; a backend may run it on several devices at once."""
    met = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        met.append(batch[0].cpu())
        return loss_of(batch_loss()(model, batch))

    with torch.no_grad():
        session.run(step, model, batch)
    return torch.cat(met)


def _unsharded(kit: LoaderChecks) -> Tensor:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(SAMPLES), batch_size=BATCH_SIZE)
        batches = session.prepare_loader(loader, shard=False)
        return torch.cat([_inputs(session, model, batch) for batch in batches])


def _evaluated(kit: LoaderChecks, samples: int, batch_size: int) -> tuple[int, float]:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(samples), batch_size=batch_size)
        return _mean_loss(session, model, session.prepare_loader(loader, training=False))


def _own_samples(data_rank: int) -> int:
    """Return how many samples a rank has that brings its own: each one a batch of two more."""
    return 2 * data_rank + 1


def _evaluated_unevenly(kit: LoaderChecks) -> tuple[int, int, float]:
    with prepared(kit) as (session, model):
        loader = DataLoader(data(_own_samples(session.data_rank)), batch_size=2)
        found = _mean_loss(session, model, session.prepare_loader(loader, training=False, shard=False))
        return session.data_size, *found


def _mean_loss(session: Session, model: nn.Module, batches: Iterable[Any]) -> tuple[int, float]:
    """Return how many samples were counted on all data ranks, and their mean loss."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        session.sync_buffers(model)
        for batch in batches:
            loss = loss_of(session.run(batch_loss(), model, batch)).item()
            assert session.share is not None
            samples = session.share.samples
            total += torch.tensor([samples, samples * loss], dtype=torch.float64)
    samples, loss_sum = session.reduce(total.to(session.device), "sum").tolist()
    return int(samples), loss_sum / samples
