"""``tp new-plugin``: a package with a plugin that works, to begin from.

Each folder of ``templates`` is such a package as it stands, called my-plugin, so that linters, type checkers
and tests see what users get. A new one is that with its name in place of "my-plugin", "my_plugin" and
"MyPlugin", and with the version of tp-core at hand in its requirements. Nothing else varies; a template
language would leave files that no tool can read.
"""

import json
import keyword
import re
import sys
import tempfile
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from tp_core.discovery import FIRST_PARTY, KNOWN_BACKENDS
from tp_core.errors import ConfigError
from tp_core.plugins import registry

_TEMPLATES = Path(__file__).parent / "templates"
_SUFFIXES = {".md", ".py", ".toml"}
_REQUIREMENT = ">=0.1,<0.2"  # as the templates write it

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class PluginKind(StrEnum):
    """What a plugin may bring."""

    BACKEND = "backend"
    ADAPTER = "adapter"


@app.command()
def new_plugin(
    kind: Annotated[PluginKind, typer.Argument(help="What it is to bring.")],
    name: Annotated[str, typer.Argument(help="The name of the distribution, such as acme-backend.")],
    *,
    into: Annotated[Path, typer.Option(help="The folder that the new one is made in.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write a package with a plugin that works and is tested, to begin from.

    It is called NAME, brings a backend or an adapter of that name, and has the conformance kit of
    its kind among its tests.
    """
    folder = write_plugin(kind, name, into)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if as_json:
        facts = {"kind": kind.value, "name": folder.name, "folder": str(folder), "files": files}
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{folder.name}, a plugin with one {kind.value}, in {folder}:")
    for file in files:
        typer.echo(f"  {file}")
    typer.echo("\nIn that folder:\n  python -m pip install -e '.[testing]'\n  python -m pytest\n  tp doctor")


def write_plugin(kind: PluginKind, name: str, into: Path) -> Path:
    normalized = re.sub(r"[-_.]+", "-", name).lower()
    _check_name(kind, name, normalized)
    if not into.is_dir():
        msg = f"--into must be a folder, and {str(into)!r} is none; make it first"
        raise ConfigError(msg)
    folder = into.absolute() / normalized
    if folder.exists() or folder.is_symlink():
        msg = f"{str(folder)!r} is there already; take another name, or another folder with --into"
        raise ConfigError(msg)
    module = normalized.replace("-", "_")
    words = normalized.removesuffix(f"-{kind.value}").split("-")  # AcmeBackend, and not AcmeBackendBackend
    renamed = {
        "my-plugin": normalized,
        "my_plugin": module,
        "MyPlugin": "".join(word.capitalize() for word in words),
        _REQUIREMENT: _requirement(),
    }
    try:
        # Whole, or not there.
        with tempfile.TemporaryDirectory(prefix=f".{normalized}-", dir=folder.parent) as part:
            made = Path(part) / "made"
            _copy(_TEMPLATES / kind.value, made, renamed)
            (made / "src" / module / "py.typed").touch()
            made.rename(folder)
    except OSError as error:
        msg = f"{str(folder)!r} cannot be written: {error}"
        raise ConfigError(msg) from error
    return folder


def _copy(template: Path, folder: Path, renamed: dict[str, str]) -> None:
    def with_names(text: str) -> str:
        return re.sub("|".join(map(re.escape, renamed)), lambda match: renamed[match.group()], text)

    for path in template.rglob("*"):
        if path.suffix not in _SUFFIXES:
            continue  # pip compiles whatever it installs, and linters leave caches
        made = folder / with_names(str(path.relative_to(template)))
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(with_names(path.read_text(encoding="utf-8")), encoding="utf-8")


def _requirement() -> str:
    """Return which releases of tp-core are compatible with this one."""
    major, minor, *_ = (int(number) for number in version("tp-core").split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def _check_name(kind: PluginKind, name: str, normalized: str) -> None:
    """Make sure that the names that follow from ``name`` are valid, and that nobody has them."""
    if not re.fullmatch(r"[a-z]|[a-z][a-z0-9._-]*[a-z0-9]", name, re.IGNORECASE):
        msg = (
            f"a plugin's name has letters, digits, '-', '_' and '.', begins with a letter and ends with a "
            f"letter or digit, such as 'acme-{kind.value}'; got {name!r}"
        )
        raise ConfigError(msg)
    module = normalized.replace("-", "_")
    if keyword.iskeyword(module):
        raise _refused(name, f"{module!r} is a word of the language and cannot be imported")
    if module in sys.stdlib_module_names:
        raise _refused(name, f"its module would hide {module!r} of Python's standard library")
    if normalized in FIRST_PARTY:
        raise _refused(name, f"{normalized!r} is a distribution of this project")
    if _is_installed(normalized):
        raise _refused(name, f"a distribution {normalized!r} is installed already")
    if find_spec(module) is not None:
        raise _refused(name, f"its module would hide {module!r}, which is installed")
    owner = _owner(kind, normalized)
    if owner is not None:
        raise _refused(name, f"{owner} brings a {kind.value} {normalized!r}")


def _owner(kind: PluginKind, name: str) -> str | None:
    """Return the distribution that has something of that kind and name."""
    if kind is PluginKind.ADAPTER:
        return next((c.distribution for c in registry.collate_adapters() if c.item.name == name), None)
    owners = {contribution.item.name: contribution.distribution for contribution in registry.backends()}
    return (owners | dict(KNOWN_BACKENDS)).get(name)  # those of this project, installed or not


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"a plugin cannot be called {name!r}: {reason}; take another name")
