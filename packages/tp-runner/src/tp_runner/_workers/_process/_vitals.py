"""What the system says of a worker process: its memory, and whether it was killed for want of it."""

from pathlib import Path

__all__ = ["count_oom_kills", "private_memory"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def private_memory(pid: int) -> int | None:
    """Return how many bytes a process holds that it shares with nobody; ``None`` where nobody can tell."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def count_oom_kills() -> int | None:
    """Return how many processes of this one's control group were killed for want of memory so far."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        folder = _CGROUPS / controllers / path.lstrip("/")
        for name in ("memory.events", "memory.oom_control"):  # of version 2 and version 1
            try:
                words = (folder / name).read_text().split()
            except OSError:
                continue
            if "oom_kill" in words:
                return int(words[words.index("oom_kill") + 1])
    return None
