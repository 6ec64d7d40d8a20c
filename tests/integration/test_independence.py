"""Each distribution works with what it requires alone: built, installed by itself, imported, found."""

import ast
import shutil
import tomllib
from functools import cache

import pytest

from tests.wheels import CORE, PACKAGES, RING_3, ROOT, build, problems, project, try_out, with_siblings


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a package, which is made once."""

    @cache
    def make(package):
        (made,) = build(tmp_path_factory.mktemp(package), [ROOT / "packages" / package])
        return made

    return make


NEEDS = {"tp-ray": [pytest.mark.needs("ray")]}
SLOW = ("tp-core", "tp-data", "tp-trainer")  # ``tests/matrix.sh --wheels`` tries each, each pair and all


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(p, marks=[pytest.mark.slow if p in SLOW else pytest.mark.nightly, *NEEDS.get(p, ())])
        for p in PACKAGES
    ],
)
def test_a_distribution_works_with_what_it_requires_alone(package, wheel, tmp_path):
    (tmp_path / "wheels").mkdir()
    for name in {CORE, *with_siblings([package])}:  # no other could be installed by mistake
        shutil.copy(wheel(name), tmp_path / "wheels")
    assert problems([package], try_out([package], tmp_path / "wheels", tmp_path), tmp_path) == []


def test_all_distributions_have_one_version_and_take_no_older_core():
    (version,) = {project(package)["version"] for package in PACKAGES}
    assert project("tp-simulator")["dependencies"] == ["torch>=2.11"]  # nothing of tp
    for package in set(PACKAGES) - {"tp-core", "tp-simulator"}:
        found = project(package)
        extras = [r for extra in found.get("optional-dependencies", {}).values() for r in extra]
        pins = [r for r in [*found["dependencies"], *extras] if r.startswith("tp-")]
        assert pins
        assert all(pin.endswith(f"=={version}") for pin in pins)


def test_all_distributions_are_typed_licensed_and_bound_by_the_import_contract():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    modules = {package.replace("-", "_") for package in PACKAGES}
    assert set(tools["importlinter"]["root_packages"]) == modules
    third, second, core = tools["importlinter"]["contracts"][0]["layers"]
    assert core == "tp_core"
    beside = {package.replace("-", "_") for package in RING_3}
    assert {m.strip() for m in third.split("|")} == beside
    assert {m.strip() for m in second.split("|")} == modules - beside - {"tp_core"}
    for package in PACKAGES:
        folder = ROOT / "packages" / package
        assert (folder / "src" / package.replace("-", "_") / "py.typed").exists()
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        assert project(package)["requires-python"] == ">=3.11"


@pytest.mark.parametrize("package", RING_3)
def test_the_third_ring_imports_public_names_alone(package):
    own = package.replace("-", "_")
    private = []
    for file in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != own:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            ours = [name for name in names if name.startswith("tp_")]
            private += [f"{file.name}: {name}" for name in ours if "._" in name]
    assert private == []
