"""``tp --version`` and ``tp doctor`` in plain lines, where the command line's libraries are missing."""

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
    from tp_core.cli._platform import platform_notes
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
