"""What is published: the same bytes whenever it is built, and what its metadata says is so."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(p.parent for p in ROOT.glob("packages/*/pyproject.toml"))


def _project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def _build(folder, out):
    """Build the source distribution and the wheel of ``folder``; return their bytes by name."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(p, id=p.name, marks=() if p.name in ("tp-core", "tp-trainer") else pytest.mark.nightly)
        for p in PACKAGES
    ],
)
def test_a_distribution_is_the_same_whenever_it_is_built(folder, tmp_path):
    first, second = _build(folder, tmp_path / "first"), _build(folder, tmp_path / "second")
    assert {name.rsplit(".", 1)[1] for name in first} == {"whl", "gz"}
    assert first == second


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_the_metadata_names_the_pythons_that_the_matrix_tries(folder):
    (tried,) = re.findall(
        r'^pythons=\$\{MATRIX_PYTHONS-"(.*)"\}$', (ROOT / "tests/matrix.sh").read_text(), re.M
    )
    project = _project(folder)
    prefix = "Programming Language :: Python :: 3."
    named = {c.removeprefix(prefix[:-2]) for c in project["classifiers"] if c.startswith(prefix)}
    assert named
    assert named <= set(tried.split())
    assert project["requires-python"] == f">={min(named, key=lambda v: int(v.split('.')[1]))}"


def test_a_citation_is_of_the_version_at_hand():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {_project(PACKAGES[0])['version']}\n" in text
