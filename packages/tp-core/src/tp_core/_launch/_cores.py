"""How much of the machine's CPU is this process's."""

import os

__all__ = ["available_cores"]


def available_cores() -> int:
    """Return how many cores this process may use: what taskset, Slurm and containers left to it."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
