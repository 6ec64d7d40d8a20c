"""Models that ranks made with other values: rank 0's count, and a warning names one of them."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_testing import run_ranks
from tp_trainer import Trainer

from tests.reference_training import rows_and_sums, squared_error


def _warned(backend, by_rank):
    """Return the warnings of a run whose models are seeded by the rank, or equally."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("tp_core").addHandler(handler)
    with Trainer(seed=0, progress=False, devices="cpu", backend=backend) as trainer:
        torch.manual_seed(trainer.rank if by_rank else 7)
        model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1))
        loader = DataLoader(rows_and_sums(20, dtype=torch.float32), batch_size=4)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.05), loader, step=squared_error)
    return [text for text in found if "other values" in text]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_values_that_differ_by_rank_are_named_on_the_first(backend):
    (first, second) = run_ranks(_warned, 2, backend, True)
    assert len(first) == 1
    assert (
        "models with other values ('1.weight' of rank 1), and all train on from those of rank 0" in first[0]
    )
    assert second == []
    assert run_ranks(_warned, 2, backend, False) == [[], []]
