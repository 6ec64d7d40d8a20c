"""What is known of the packages from outside Python, as text: commands, plugins, and files of a run."""

import json
import re
import tempfile
from enum import EnumType
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
from tp_core.discovery import CONTRACT_VERSION, ENTRY_POINT_GROUP, PluginRegistry

from tests.surface.runs import train
from tests.tp_commands import COMMANDS

__all__ = ["commands_text", "files_text", "plugins_text"]

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
# What torch decides alone, and other versions of it otherwise; and what differs between machines.
OPAQUE = {"environment", "generators", "hyperparameters", "schedulers", "versions"}


def commands_text():
    """Return every sub-command of `tp` with its parameters, and the keys of its JSON document."""
    table = PAGE.read_text().partition("\n## JSON\n")[2].partition("\n## ")[0]
    keys = dict(re.findall(r"^\| `tp ([a-z -]+)` \| (.+) \|$", table, re.MULTILINE))  # test_json.py holds it
    lines = []
    for name, command in sorted(COMMANDS.items()):
        lines += ["", f"tp {name}: {_first_line(command.help)}", *map(_parameter, command.params)]
        lines += [f"    JSON: {keys[name].replace('`', '')}"] if name in keys else []
    return "\n".join(lines[1:]) + "\n"


def _first_line(text):
    return " ".join((text or "").partition("\n\n")[0].split())


def _parameter(parameter):
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    many = " ..." if parameter.nargs != 1 or parameter.multiple else ""
    default = parameter.default
    default = (
        "computed" if callable(default) else repr(str(default) if isinstance(default, Path) else default)
    )
    default = " required" if parameter.required else "" if default == "None" else f" = {default}"
    hidden = " (hidden)" if getattr(parameter, "hidden", False) else ""
    help_line = _first_line(getattr(parameter, "help", ""))
    return f"    {words} {_kind(parameter)}{many}{default}{hidden}: {help_line}".rstrip()


def _kind(parameter):
    """Return the type of a parameter, or its choices; typer had it in click's words."""
    if hasattr(parameter, "type_descriptor"):
        annotation = parameter.type_descriptor.annotation
        if get_origin(annotation) is Literal:
            return "|".join(get_args(annotation))
        if isinstance(annotation, EnumType):
            return "|".join(str(member.value) for member in annotation)
        return getattr(annotation, "__name__", "str")
    kind = parameter.type
    names = {"integer": "int", "text": "str", "boolean": "bool", "path": "Path"}
    return "|".join(map(str, getattr(kind, "choices", []))) or names.get(kind.name, kind.name)


def plugins_text():
    """Return what each distribution brings to the registry."""
    plugins = PluginRegistry()
    lines = [f"entry points {ENTRY_POINT_GROUP}, contract {CONTRACT_VERSION}"]
    for info in sorted(plugins.plugins(), key=lambda info: info.name):
        if info.distribution.startswith("tp-"):
            lines.append(f"{info.distribution}: {info.name}")
            lines += [
                f"    {kind}: {', '.join(names)}"
                for kind, names in sorted(plugins.contributions(info.name).items())
            ]
    return "\n".join(lines) + "\n"


def files_text():
    """Return the files that runs leave, and the keys in them; of the second those that the first has not."""
    lines, seen = [], set()
    for kind in ("rich", "stream"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            train(folder, kind, 3)
            lines += ["", f"a run '{kind}', ended in its first epoch"]
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                lines.append(f"    {path.relative_to(folder).as_posix()}")
                found = dict.fromkeys(f"        {line}" for line in _contents(path))
                lines += [line for line in found if (path.name, line) not in seen]
                seen |= {(path.name, line) for line in found}
    return "\n".join(lines[1:]) + "\n"


def _contents(path):
    if path.suffix == ".json":
        yield from _keys(json.loads(path.read_text()))
    elif path.suffix == ".jsonl":
        for record in map(json.loads, path.read_text().splitlines()):
            yield from (f"{record['type']} {line}" for line in _keys(record))
    elif path.suffix == ".csv":
        yield path.read_text().partition("\n")[0]
    elif path.suffix == ".pt":
        yield from _keys(torch.load(path, weights_only=True))


def _keys(value, above=""):
    """Yield each key with the kind of its value; those of torch's own states are left out."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {"[]": value[0]}
    if isinstance(value, dict) and value:
        for key, below in value.items():
            opaque = key in OPAQUE and isinstance(below, (dict, list))
            yield from [f"{above}{key}: ..."] if opaque else _keys(below, f"{above}{key}.")
    else:
        yield f"{above[:-1]}: {type(value).__name__}"
