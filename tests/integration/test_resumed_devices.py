"""A run that is resumed on other devices says that what they draw differs."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_trainer import Trainer

from tests.reference_training import rows_and_sums, squared_error


def train(folder, devices, epochs):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    loader = DataLoader(rows_and_sums(20, dtype=torch.float32), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with Trainer(seed=3, progress=False, devices=devices) as trainer:
        trainer.fit(
            model, optimizer, loader, step=squared_error, epochs=epochs, checkpoint=folder, resume="auto"
        )
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("before", "then", "said"),
    [
        ("cpu", ["cpu", "cpu"], "saved on cpu, and this run is on cpu, cpu: what it draws"),
        (["cpu", "cpu"], "cpu", "saved on cpu, cpu, and this run is on cpu: what it draws"),
        (["cpu", "cpu"], ["cpu", "cpu"], None),
    ],
)
def test_other_devices_are_named(tmp_path, caplog, before, then, said):
    train(tmp_path / "run", before, 1)
    with caplog.at_level(logging.WARNING, "tp_trainer"):
        weights = train(tmp_path / "run", then, 2)
    assert [said in record.getMessage() for record in caplog.records] == ([] if said is None else [True])
    if said is None:
        whole = train(tmp_path / "whole", then, 2)
        assert all(map(torch.equal, weights, whole))
