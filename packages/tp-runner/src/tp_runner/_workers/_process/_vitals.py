"""What the system says of a worker process: its memory, and whether it was killed for want of it."""

from pathlib import Path

__all__ = ["OomKills", "private_memory"]

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
        """Whether there was one more such kill than this has explained; it is explained then."""
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
