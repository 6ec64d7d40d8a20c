"""What is refused before a worker process starts."""

import os

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._process._vitals import private_memory
from tp_runner._workers._setup import depth

__all__ = ["check_start"]

DEEPEST = 10
"""Workers that start runners whose workers start runners ... are refused from here on."""


def check_start(devices: tuple[str, ...], settings: Settings) -> None:
    """Refuse workers that would fail in ways that nobody understands.

    Raises:
        ConfigError: Runners start runners without an end, CUDA would be forked, or nobody can tell how much
            memory a worker holds.
    """
    _require_forkable(devices, settings)
    if settings.max_memory_per_worker is not None and private_memory(os.getpid()) is None:
        msg = (
            f"max_memory_per_worker={settings.max_memory_per_worker} needs Linux's /proc, which says how "
            "much a process holds; give max_items_per_worker here"
        )
        raise ConfigError(msg)
    if depth() >= DEEPEST:
        msg = (
            f"this runner would be started by a worker, by a worker, ... {DEEPEST} deep; a program that "
            "starts runners at import time does that without an end: put it under "
            "if __name__ == '__main__'"
        )
        raise ConfigError(msg)


def _require_forkable(devices: tuple[str, ...], settings: Settings) -> None:
    if settings.start_method == "fork" and any(device.startswith("cuda") for device in devices):
        import torch

        if torch.cuda.is_initialized():
            msg = (
                "start_method='fork' with CUDA devices needs a parent that has not used CUDA, and "
                "this one has; take 'forkserver' or 'spawn'"
            )
            raise ConfigError(msg)
