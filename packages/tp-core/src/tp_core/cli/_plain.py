"""What ``tp`` says without the command line's libraries: version, a plain doctor, notes on the platform."""

import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version


def plain_command(words: Sequence[str]) -> Callable[[], int] | None:
    """Return what runs a command line without further libraries, or ``None`` if that takes them."""
    if list(words) == ["--version"]:
        return _say_version
    return _doctor if words[:1] == ["doctor"] else None


def _say_version() -> int:
    print(f"tp {version('tp-core')}")
    return 0


def _doctor() -> int:
    """Print versions, devices and plugins; return 1 if a plugin is broken."""
    import torch

    from tp_core import available_devices
    from tp_core.plugins import registry

    print(f"python {platform.python_version()}, torch {torch.__version__}, tp-core {version('tp-core')}")
    print("devices:", ", ".join(map(str, available_devices())))
    for plugin in registry.plugins():
        print(f"plugin {plugin.name} of {plugin.distribution} {plugin.version}")
    problems = [f"plugin {broken.info.name}: {broken.error}; {broken.remedy}" for broken in registry.broken()]
    problems += map(str, registry.conflicts())
    for line in platform_notes():
        print(f"note: {line}")
    for line in problems:
        print(f"problem: {line}")
    print("the whole report, with measurements, needs: pip install 'tp-core[cli]'", file=sys.stderr)
    return 1 if problems else 0


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
