"""The callback does what every callback must do, and knows the largest norm."""

from pathlib import Path

import pytest
import torch
from torch import nn
from tp_core.plugins import Callback
from tp_core.testing import PluginConformance
from tp_trainer import Trainer
from tp_trainer.testing import CallbackConformance

from my_plugin import MyPluginCallback


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"callback": ("my-plugin",)}


class TestCallback(CallbackConformance):
    def make(self, folder: Path) -> Callback:
        return MyPluginCallback()


def test_it_keeps_the_largest_norm_of_each_epoch() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(model(batch).sum())  # its gradient is the batch

    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = MyPluginCallback()
    with Trainer(devices="cpu", progress=False) as trainer:
        batches = [torch.tensor([[2.0]]), torch.tensor([[5.0]]), torch.tensor([[3.0]])]
        trainer.fit(model, optimizer, batches, step=step, epochs=2, callbacks=[callback])
    assert callback.largest == pytest.approx([5.0, 5.0])
