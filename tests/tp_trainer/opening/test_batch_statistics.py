"""Norms that take the statistics of a rank's share of a batch are named when the model is prepared."""

import logging

import pytest
from torch import nn
from tp_testing import run_ranks
from tp_trainer import Trainer


def warnings_of(norm):
    """Return what is logged on a rank when a model with a norm is prepared."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("tp_trainer").addHandler(handler)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if norm else nn.LayerNorm(2))
    model[1].train(norm != "frozen")
    with Trainer(devices="cpu", progress=False) as trainer:
        trainer.prepare(model)
    return [message for message in records if message.startswith("batch norms")]


@pytest.mark.parametrize(
    ("norm", "ranks", "said"), [("batch", 2, 1), ("frozen", 2, 0), ("", 2, 0), ("batch", 1, 0)]
)
def test_batch_norms_are_named_on_several_ranks(norm, ranks, said):
    first, *others = run_ranks(warnings_of, ranks, norm)
    assert len(first) == said
    assert all("differ from one device's (1)" in message for message in first)
    assert others == [[]] * (ranks - 1)
