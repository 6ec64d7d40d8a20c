"""The backend does what every backend must do, and keeps activations on the host."""

import pytest
import torch
from torch import nn
from tp_testing import BackendConformance, PluginConformance, TrainingConformance
from tp_trainer import Trainer

from my_plugin.backend import MyPluginBackend


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"backend": ("my-plugin",)}


class TestBackend(BackendConformance):
    backend = MyPluginBackend


class TestTraining(TrainingConformance):
    backend = MyPluginBackend


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    hidden = model(batch).exp()  # its backward pass needs what it returned
    loss = torch.as_tensor(hidden.mean())
    with torch.no_grad():
        hidden.zero_()
    return loss


def train(backend: str) -> nn.Linear:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(backend=backend, devices="cpu", progress=False, seed=0) as trainer:
        trainer.fit(model, optimizer, [torch.ones(4, 2)], step=step)
    return model


def test_what_backward_needs_is_a_copy_that_lies_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train("single")
    assert torch.isfinite(train("my-plugin").weight).all()
