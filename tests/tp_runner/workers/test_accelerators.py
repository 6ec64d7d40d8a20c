"""What holds for CUDA devices holds for those of any other maker."""

from types import SimpleNamespace

import pytest
import torch
from tp_core.errors import ConfigError
from tp_runner._workers import _start  # private: such a device cannot be had here

FORK = SimpleNamespace(start_method="fork")


@pytest.fixture
def module(monkeypatch):
    """Return the stand-in for ``torch.xpu`` on a machine with two devices, which this process uses."""
    module = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return module


def test_a_fork_of_a_process_that_has_used_the_accelerator_is_refused(module):
    with pytest.raises(
        ConfigError, match="'fork' with XPU devices needs a parent that has not used XPU, and"
    ):
        _start._require_forkable(("cpu", "xpu:0"), FORK)
    _start._require_forkable(("cpu", "xpu:0"), SimpleNamespace(start_method="spawn"))
    _start._require_forkable(("cpu",), FORK)
    module.is_initialized = lambda: False
    _start._require_forkable(("xpu:0",), FORK)
