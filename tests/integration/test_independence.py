"""Each distribution works with tp-core alone: built, installed by itself, imported, found."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))

FAST = {"tp-trainer"}  # it has the most requirements

LOOK = """
import importlib, json, sys
name = sys.argv[1]
importlib.import_module(name)
from tp_core.plugins import registry
print(json.dumps({
    "plugins": [p.distribution for p in registry.plugins()],
    "broken": [b.traceback for b in registry.broken()],
    "loaded": sorted({m.split(".")[0] for m in sys.modules if m.startswith("tp_")}),
    "file": sys.modules[name].__file__,
}))
"""

# A README as a newcomer runs it: block after block, in one program, and no warning on the way.
BLOCKS = """
import pathlib, re, sys
text = pathlib.Path(sys.argv[1]).read_text()
blocks = re.findall(r"^```python\\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
assert blocks
namespace = {"__name__": "__main__"}
for block in blocks:
    exec(block, namespace)
"""


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def run(*command, **kwargs):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=800, check=False, **kwargs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / "packages" / package for package in PACKAGES]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, *sources)
    return {wheel.name.split("-")[0]: wheel for wheel in folder.glob("*.whl")}


def required(name, extras):
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


def declared(package):
    """Return the distributions of others that ``package`` says it needs, with all that those need."""
    found, queue = set(), [(package, frozenset())]
    while queue:
        key = queue.pop()
        if key not in found:
            found.add(key)
            needs = map(Requirement, required(*key))
            queue += [(need.name.lower(), frozenset(need.extras)) for need in needs]
    return [distribution(name) for name in {name for name, _ in found} - set(PACKAGES)]


def link(needed, folder):
    """Make the files of the ``needed`` distributions, and no others, importable from ``folder``."""
    folder.mkdir()
    for found in needed:
        for top in {f.parts[0] for f in found.files or () if f.parts[0] not in {"..", "__pycache__"}}:
            target = Path(found.locate_file(top))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


def install(package, wheels, tmp_path):
    """Make an environment with the wheels of ``package`` and tp-core, and what they require."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    ours = {"tp-core", package}
    link(declared(package), tmp_path / "others")
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (site / "others.pth").write_text(str(tmp_path / "others"))
    chosen = [wheels[name.replace("-", "_")] for name in sorted(ours)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps"]
    run(*pip, "--no-index", *chosen)
    return python


def without_variables():
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TP_"))}


@pytest.mark.parametrize(
    "package", [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in PACKAGES]
)
def test_a_distribution_works_with_tp_core_alone(package, wheels, tmp_path):
    python = install(package, wheels, tmp_path)
    module = package.replace("-", "_")
    found = json.loads(run(python, "-W", "error", "-c", LOOK, module, cwd=tmp_path, env=without_variables()))
    assert found["file"].startswith(str(tmp_path / "env"))
    assert found["broken"] == []
    assert set(found["loaded"]) <= {"tp_core", module}
    has_plugin = "tp.plugins" in project(package).get("entry-points", {})
    assert found["plugins"] == ([package] if has_plugin else [])

    readme = ROOT / "packages" / package / "README.md"
    run(python, "-W", "error", "-c", BLOCKS, readme, cwd=tmp_path, env=without_variables())


def test_all_distributions_have_one_version_and_pin_tp_core():
    versions = {project(package)["version"] for package in PACKAGES}
    assert len(versions) == 1
    for package in set(PACKAGES) - {"tp-core"}:
        (pin,) = [r for r in project(package)["dependencies"] if r.startswith("tp-core")]
        assert pin.endswith(">=0.1,<0.2")


def test_all_distributions_are_typed_licensed_and_bound_by_the_import_contract():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    modules = {package.replace("-", "_") for package in PACKAGES}
    assert set(tools["importlinter"]["root_packages"]) == modules
    siblings, core = tools["importlinter"]["contracts"][0]["layers"]
    assert core == "tp_core"
    assert {m.strip() for m in siblings.split("|")} == modules - {"tp_core"}
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        assert (folder / "src" / package.replace("-", "_") / "py.typed").exists()
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        assert project(package)["requires-python"] == ">=3.11"
