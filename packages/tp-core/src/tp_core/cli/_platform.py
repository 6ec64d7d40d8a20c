"""What does not work on this platform, in a sentence each."""

import importlib.util
import sys


def platform_notes(name: str = sys.platform) -> list[str]:
    """Return what does not work here, and what to take instead.

    Args:
        name: The platform, as ``sys.platform`` has it.

    Example:
        >>> platform_notes("linux")
        []
    """
    notes = []
    if name == "win32":
        if importlib.util.find_spec("tp_runner") is not None:
            notes.append(
                "worker processes of tp-runner do not run on Windows: take engine='thread', 'inline' or 'ray'"
            )
        notes.append("on Windows ranks meet over gloo alone: NCCL is on Linux; WSL has it")
    elif name == "darwin":
        notes.append("on macOS ranks meet over gloo, on the CPU: 'mps' trains in one process")
    return notes
