"""What ``tp`` says without the command line's libraries: help, versions, plain doctor, errors, notes."""

import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import distributions, version
from importlib.resources import files

from tp_core.errors import ConfigError
from tp_core.messages import did_you_mean
from tp_core.output import print_to_stderr


def plain_command(words: Sequence[str]) -> Callable[[], int] | None:
    """Return what runs a command line without further libraries, or ``None`` if that takes them."""
    match list(words):
        case ["--version"]:
            return _print_versions
        case [] | ["--help"]:
            return _print_help
        case ["doctor"] | ["doctor", "--ranks", "0"]:
            return _doctor
        case ["explain", name]:
            return partial(_explain, name)
    return None


def installed_packages() -> dict[str, str]:
    """Return the versions of tp's packages that are here, and of others' of that prefix, by name."""
    versions = {}
    for distribution in distributions():
        name = str(distribution.name).lower().replace("_", "-")
        if not name.startswith("tp-"):
            continue
        needs_core = any(re.match(r"tp[-_]core\b", each) for each in distribution.requires or ())
        if name == "tp-core" or needs_core:
            versions[name] = distribution.version
    return dict(sorted(versions.items()))


def _print_versions() -> int:
    print("\n".join(f"{name} {number}" for name, number in installed_packages().items()))
    return 0


def _print_help() -> int:
    """Print the commands that are here, without their options."""
    from tp_core.plugins import registry

    print("Usage: tp COMMAND, one of these:\n")
    commands = {"doctor": "Show devices, plugins and problems.", "explain": "Print what an error means."}
    commands |= {contribution.item.name: contribution.item.help for contribution in registry.commands()}
    width = max(map(len, commands))
    print("\n".join(f"  {name:<{width}}  {text}" for name, text in commands.items()))
    print("\nAll but tp --version, tp doctor and tp explain ERROR need: pip install 'tp-core[cli]'")
    print("Packages:", ", ".join(f"{name} {number}" for name, number in installed_packages().items()))
    return 0


def _explain(name: str) -> int:
    try:
        print(section_of(name))
    except ConfigError as error:
        print_to_stderr(f"tp explain: {error}")
        return 2
    return 0


def sections() -> dict[str, str]:
    """Return the sections on errors, each by its name in the page's address."""
    page = files("tp_core.cli").joinpath("errors.md").read_text(encoding="utf-8")
    matches = re.findall(r"^\(([\w-]+)\)=\n(#.*?)(?=^\(|^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: text.strip() for name, text in matches}


def section_of(error: str) -> str:
    """Return the section on an error, as Markdown."""
    by_name = sections()
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", error.rpartition("#")[2].rpartition(".")[2]).lower()
    if name not in by_name:
        meant = did_you_mean(name, by_name)
        if f"{name}-error" in by_name:
            meant = f"; did you mean '{name}-error'?"
        msg = f"no error of tp is called {error!r}{meant}; those that have a section: {', '.join(by_name)}"
        raise ConfigError(msg)
    return by_name[name]


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
    print_to_stderr("the whole report, with ranks that meet, needs: pip install 'tp-core[cli]'")
    if problems:
        return 1
    return 0


def platform_notes(name: str = sys.platform) -> list[str]:
    """Return what does not work here, and what to take instead."""
    notes = []
    if name == "win32":
        if importlib.util.find_spec("tp_runner") is not None:
            notes.append(
                "worker processes of tp-runner do not run on Windows: take engine='thread', 'inline' or 'ray'"
            )
        notes.append("tp launch does not run on Windows: start scripts with torchrun, or in WSL")
        notes.append("on Windows ranks meet over gloo alone: NCCL is on Linux; WSL has it")
    elif name == "darwin":
        notes.append("on macOS ranks meet over gloo, on the CPU: the accelerator trains in one process")
    return notes
