"""The cores that this process may use: a module of its own, as every start of workers asks."""

import os


def available_cores() -> int:
    """Return how many cores this process may use, after the limits of taskset, Slurm and cpusets."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
