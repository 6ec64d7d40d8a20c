"""What is refused before a worker process starts; its memory, and whether it was killed for want of it."""

import os
from pathlib import Path

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._setup import depth

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
    if settings.start_method != "fork":
        return
    for kind in sorted({device.partition(":")[0] for device in devices} - {"cpu"}):
        import torch

        is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            name = kind.upper()
            msg = (
                f"start_method='fork' with {name} devices needs a parent that has not used {name}, and "
                "this one has; take 'forkserver' or 'spawn'"
            )
            raise ConfigError(msg)


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def private_memory(pid: int) -> int | None:
    """Return how many bytes a process holds that it shares with nobody; ``None`` where nobody can tell."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


class OomKills:
    """Tells of deaths whether the system has killed for want of memory: it counts, and names nobody."""

    def __init__(self) -> None:
        self._explained = _count_oom_kills()

    def explain_one(self) -> bool:
        """Return whether there was one more such kill than this has explained; it is explained then."""
        count = _count_oom_kills()
        if self._explained is None or count is None or count <= self._explained:
            return False
        self._explained += 1
        return True


def _count_oom_kills() -> int | None:
    """Return how many processes of this one's control group were killed for want of memory so far."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = _CGROUPS / controllers
        # A container may see its own group as the root, and read the name that it has outside.
        for folder in (mount / path.lstrip("/"), mount):
            for name in ("memory.events", "memory.oom_control"):  # of version 2 and version 1
                try:
                    words = (folder / name).read_text().split()
                except OSError:
                    continue
                if "oom_kill" in words:
                    return int(words[words.index("oom_kill") + 1])
    return None
