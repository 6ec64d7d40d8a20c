"""Wheels in environments that have what their metadata names, and nothing else.

``python -m tests.wheels FOLDER`` installs every distribution alone, every pair and all together from the
wheels in a folder, without an index, and runs the README of each. What they need of others is taken from the
environment of the interpreter that runs this, which ``tests/matrix.sh --wheels`` makes.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
CORE = "tp-core"
# They may import public names of the others, and may break alone.
RING_3 = ("tp-accelerate", "tp-lightning", "tp-ray", "tp-simulator", "tp-testing")

_LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    from tp_core.plugins import registry
except ModuleNotFoundError:  # beside tp-simulator, which needs torch alone
    plugins, broken = [], []
else:
    plugins, broken = registry.plugins(), registry.broken()
print(json.dumps({
    "plugins": [p.distribution for p in plugins],
    "broken": [b.traceback for b in broken],
    "loaded": sorted({m.split(".")[0] for m in sys.modules if m.startswith("tp_")}),
    "versions": sorted({sys.modules[name].__version__ for name in sys.argv[1:]}),
    "files": [sys.modules[name].__file__ for name in sys.argv[1:]],
}))
"""

# torch 2.11 says it of tensors that are made with check_invariants=False, as it asks for.
_WORD_OF_TORCH = "ignore:Sparse invariant checks are implicitly disabled:UserWarning"

# A README as a newcomer runs it: block after block, in one program, and no warning on the way.
_BLOCKS = """
import pathlib, re, sys
text = pathlib.Path(sys.argv[1]).read_text()
blocks = re.findall(r"^```python\\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
assert blocks
namespace = {"__name__": "__main__"}
for block in blocks:
    exec(block, namespace)
"""


def project(package: str) -> dict[str, Any]:
    """Return the table [project] of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def with_siblings(packages: Iterable[str]) -> list[str]:
    """Return packages and those of this repository that they require, without tp-core."""
    found: set[str] = set()
    queue = [*packages]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            needs = (Requirement(text).name for text in project(name)["dependencies"])
            queue += [need for need in needs if need in PACKAGES and need != CORE]
    return sorted(found)


def run(*command: object, **settings: Any) -> str:
    """Run a program to its end, and return what it printed.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=800, check=False, **settings
    )
    if done.returncode:
        msg = f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
        raise RuntimeError(msg)
    return done.stdout


def build(folder: Path, sources: Iterable[Path]) -> list[Path]:
    """Make the wheels of source folders."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, *sources)
    return sorted(folder.glob("*.whl"))


def _required(name: str, extras: Iterable[str]) -> Iterator[str]:
    """Yield what a distribution requires: ours by their pyproject.toml, others by their metadata."""
    if name in PACKAGES:
        yield from project(name)["dependencies"]
        for extra in extras:
            yield from project(name)["optional-dependencies"][extra]
        return
    for text in distribution(name).requires or ():
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield text


def _declared(packages: Iterable[str]) -> list[Distribution]:
    """Return the distributions of others that packages say they need, with all that those need."""
    found: set[tuple[str, frozenset[str]]] = set()
    queue = [(package, frozenset[str]()) for package in packages]
    while queue:
        key = queue.pop()
        if key not in found:
            found.add(key)
            needs = map(Requirement, _required(*key))
            queue += [(need.name.lower(), frozenset(need.extras)) for need in needs]
    return [distribution(name) for name in {name for name, _ in found} - set(PACKAGES)]


def _link(needed: Iterable[Distribution], folder: Path) -> None:
    """Make the files of distributions, and of no others, importable from ``folder``."""
    folder.mkdir()
    for found in needed:
        for top in {f.parts[0] for f in found.files or () if f.parts[0] not in {"..", "__pycache__"}}:
            target = Path(str(found.locate_file(top)))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


def environment(packages: Iterable[str], folder: Path) -> Path:
    """Make an environment with what packages require of others, and return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    _link(_declared([CORE, *packages]), folder / "others")
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    (site / "others.pth").write_text(str(folder / "others"))
    return folder / "env" / "bin" / "python"


def install(python: Path, wheels: Path, *requirements: str) -> None:
    """Install from a folder alone, as the metadata of the wheels says.

    Raises:
        RuntimeError: A requirement cannot be met.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python]
    run(*pip, "install", "--no-index", "--find-links", wheels, *requirements, env=_without_finding())
    run(*pip, "check")


def _without_finding() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"} | {"PIP_CONFIG_FILE": os.devnull}


def try_out(packages: Iterable[str], wheels: Path, folder: Path) -> dict[str, Any]:
    """Install packages, import them, and run the README of each as a newcomer does.

    A README is left out if it has the newcomer install more than these packages, and imports it.

    Returns:
        What was found: plugins, broken ones, packages that were loaded, versions, files.

    Raises:
        RuntimeError: Something failed, or printed a warning.
    """
    packages = list(packages)
    python = environment(packages, folder)
    install(python, wheels, *packages)
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TP_"))}
    modules = [package.replace("-", "_") for package in packages]
    quiet = {"cwd": folder, "env": alone}
    found: dict[str, Any] = json.loads(run(python, "-W", "error", "-c", _LOOK, *modules, **quiet))
    for package in packages:
        readme = ROOT / "packages" / package / "README.md"
        if not _others(readme.read_text()) <= {*packages, CORE}:
            continue
        run(python, "-W", "error", "-W", _WORD_OF_TORCH, "-c", _BLOCKS, readme, **quiet)
    return found


def _others(readme: str) -> set[str]:
    """Return the distributions that a page imports, of those that its first line of ``pip install`` names."""
    named = set(re.search(r"^    pip install (.*)", readme, re.MULTILINE)[1].split())  # type: ignore[index]
    imported = re.findall(r"^(?:from|import) (tp_\w+)", readme, re.MULTILINE)
    return named & {module.replace("_", "-") for module in imported}


def problems(packages: list[str], found: dict[str, Any], folder: Path) -> list[str]:
    """Return what is not as it should be of what :func:`try_out` returned."""
    packages = with_siblings(packages)
    modules = {package.replace("-", "_") for package in packages}
    plugins = [p for p in packages if "tp.plugins" in project(p).get("entry-points", {})]
    checks = {
        f"broken plugins: {found['broken']}": found["broken"] == [],
        f"it loaded {found['loaded']}": set(found["loaded"]) <= {"tp_core", *modules},
        f"plugins {found['plugins']}": sorted(found["plugins"]) == plugins,
        f"versions {found['versions']}": found["versions"] == [project(CORE)["version"]],
        f"files {found['files']}": all(file.startswith(str(folder)) for file in found["files"]),
    }
    return [text for text, is_right in checks.items() if not is_right]


def sets() -> list[list[str]]:
    """Return what is tried: each distribution alone, each pair, and all; tp-core comes with every one."""
    others = [package for package in PACKAGES if package != CORE]
    return [[p] for p in PACKAGES] + [list(pair) for pair in itertools.combinations(others, 2)] + [PACKAGES]


def main(wheels: Path) -> int:
    """Try all sets; print those that fail, and a line at the end."""
    failures = 0
    for packages in sets():
        with tempfile.TemporaryDirectory() as name:
            try:
                wrong = problems(packages, try_out(packages, wheels, Path(name)), Path(name))
            except RuntimeError as error:
                wrong = [str(error)]
        print(f"{'FAILED' if wrong else 'ok'} {' '.join(packages)}", *wrong, sep="\n  ", flush=True)
        failures += bool(wrong)
    tried = len(sets())
    print(f"{tried - failures} passed, {failures} failed" if failures else f"{tried} passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
