"""Ports that nobody else takes between being chosen and being used."""

import os
import socket
from itertools import count
from pathlib import Path

__all__ = ["free_port"]

_LOWEST = 10_000
_BLOCK = 64
"""How many ports each process goes through before it comes back to the first one."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_calls = count()


def free_port() -> int:
    """Return a TCP port that is free now, and that no other process is likely to be given.

    It is below those that the system gives out by itself, where a connection of any other program may
    take it before it is used; and processes with neighboring ids choose from blocks of their own.
    """
    blocks = (_first_of_the_system() - _LOWEST) // _BLOCK
    for _ in range(_BLOCK if blocks > 0 else 0):
        port = _LOWEST + os.getpid() % blocks * _BLOCK + next(_calls) % _BLOCK
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
        return chosen


def _first_of_the_system() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # what Linux begins with unless it is told otherwise; others begin higher


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
