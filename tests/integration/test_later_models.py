"""Models that are made after dropout on several devices of one process are named."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

from tests.reference_training import squared_error


@pytest.mark.parametrize("backend", ["tuple", "dp-gather"])
@pytest.mark.parametrize(("middle", "said"), [(nn.Dropout(0.5), 1), (nn.Tanh(), 0)])
def test_a_model_that_is_made_after_dropout_is_named(caplog, backend, middle, said):
    loader = DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
    with Trainer(seed=0, devices=["cpu", "cpu"], backend=backend, progress=False) as trainer:
        for _ in range(2):
            model = nn.Sequential(nn.Linear(1, 4), middle, nn.Linear(4, 1))
            trainer.fit(model, torch.optim.SGD(model.parameters(), 0.1), loader, step=squared_error)
    assert caplog.text.count("begins with other weights than on one device") == said
