"""The names of the accelerators are among a run's facts, whoever made them."""

from types import SimpleNamespace

import pytest
import torch
from tp_trainer.loggers._named import environment


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(get_device_name=lambda i: f"Max {i}"), "Max 0, Max 1"),
        (SimpleNamespace(), "xpu, xpu"),
    ],
    ids=["named", "without names"],
)
def test_every_accelerator_is_named(monkeypatch, module, expected):
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert environment({})["gpus"] == expected
