"""Forks of a process that knows an accelerator: what holds for CUDA devices holds for those of any maker."""

import pytest
from tp_core.errors import ConfigError
from tp_runner._workers import _start  # private: such a device cannot be had here


def test_a_fork_of_a_process_that_has_asked_for_accelerators_is_refused():
    with pytest.raises(ConfigError, match="'fork' cannot have XPU devices: this process has asked"):
        _start._refuse_accelerators(("cpu", "xpu:0"))
    _start._refuse_accelerators(("cpu",))
