"""Which process an id means: the kernel gives it to another one later on."""

from pathlib import Path

import psutil

__all__ = ["find_process", "identity"]

_MAX_PID = 2**31 - 1


def identity(pid: int) -> str | None:
    """Return what no other process shares with the one that has this id now; None if there is none.

    On Linux it is the boot and the moment of the start in ticks since then, which setting the clock
    does not change.
    """
    if not 0 < pid <= _MAX_PID:
        return None
    try:
        # The name of the program comes second, in parentheses, and may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except ProcessLookupError:
        return None
    except OSError:
        return _portable_identity(pid)
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def find_process(pid: int, known: str) -> psutil.Process | None:
    """Return the process with this id and identity, or None when it has gone."""
    if identity(pid) != known:
        return None
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _portable_identity(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"created/{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
