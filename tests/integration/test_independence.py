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


def project(package):
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def run(*command, **kwargs):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=55, check=False, **kwargs
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


def declared(package):
    """Return the distributions that ``package`` says it needs, with all that those need."""
    found, queue = {}, [(r, ()) for r in project(package)["dependencies"]]
    while queue:
        text, extras = queue.pop()
        requirement = Requirement(text)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
        ):
            continue
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key not in found:
            found[key] = distribution(requirement.name)
            queue += [(r, tuple(requirement.extras)) for r in found[key].requires or ()]
    return {d.metadata["Name"]: d for d in found.values()}


def link(needed, folder):
    """Make the files of the ``needed`` distributions, and no others, importable from ``folder``."""
    folder.mkdir()
    for found in needed.values():
        for top in {f.parts[0] for f in found.files or () if f.parts[0] not in {"..", "__pycache__"}}:
            target = Path(found.locate_file(top))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_distribution_works_with_tp_core_alone(package, wheels, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    ours = {"tp-core", package}
    needed = {n: d for n, d in declared(package).items() if n not in PACKAGES}
    link(needed, tmp_path / "others")
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (site / "others.pth").write_text(str(tmp_path / "others"))
    chosen = [wheels[name.replace("-", "_")] for name in sorted(ours)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps"]
    run(*pip, "--no-index", *chosen)

    module = package.replace("-", "_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TP_"))}
    found = json.loads(run(python, "-W", "ignore", "-c", LOOK, module, cwd=tmp_path, env=environ))
    assert found["file"].startswith(str(tmp_path / "env"))
    assert found["broken"] == []
    assert set(found["loaded"]) <= {"tp_core", module}
    has_plugin = "tp.plugins" in project(package).get("entry-points", {})
    assert found["plugins"] == ([package] if has_plugin else [])


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
