"""Whose share a batch is, told by its tensors, however many batches have come and gone."""

from types import SimpleNamespace

import pytest
import torch
from tp_core.data import PreparedLoader, Share
from tp_core.errors import StepError
from tp_trainer._steps._loaders import BatchShares  # private: what it keeps is to be freed


def watched(batches):
    """Return what knows the shares of ``batches``, and the loader that yields them."""
    one_of_two_ranks = SimpleNamespace(data_size=2)
    shares, loader = BatchShares(one_of_two_ranks), PreparedLoader(batches, shard=False)
    shares.watch(loader, training=True)
    return shares, loader


def batch_of(n, kind):
    x, y = torch.ones(n, 1), torch.zeros(n)
    return {"tuple": (x, y), "dict": {"x": x, "y": y}, "nested": {"x": [x, "a word"], "y": (y,)}}[kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "nested"])
def test_batches_that_are_kept_are_known_among_many_that_are_gone(kind):
    shares, loader = watched(batch_of(1 + i % 5, kind) for i in range(1000))
    kept = [batch for i, batch in enumerate(loader) if i % 100 == i // 100]
    assert [shares.of_batch(batch) for batch in kept] == [Share(n, n) for n in [1, 2, 3, 4, 5] * 2]
    with pytest.raises(StepError, match="has no tensor that a prepared loader has yielded"):
        shares.of_batch(batch_of(1, kind))


def test_the_loss_of_a_batch_is_known_when_the_next_one_is_there():
    shares, loader = watched([batch_of(n, "tuple") for n in (3, 2, 1)])
    losses = []
    for batch in loader:
        losses.append(batch[0].sum())
        shares.note_loss(losses[-1], batch)
    assert [shares.of_loss(loss).samples for loss in losses] == [3, 2, 1]
