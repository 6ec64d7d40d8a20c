"""Plugins as distributions that are installed and tried: what `tp new-plugin` writes, and two examples."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.run_tp import KINDS, new_plugin

ROOT = Path(__file__).parents[2]
BROUGHT = {"adapter": "collate adapter"}  # how the registry calls it, where that differs


def run(*command, folder, path=""):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(path), *sys.path]))}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def succeed(*command, **where):
    done = run(*command, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def published(folder, tmp_path):
    """Install a package; return what `tp doctor` says of its plugin, and the last line of its own tests."""
    succeed("hatchling", "build", "--target", "wheel", "--directory", tmp_path / "dist", folder=folder)
    (wheel,) = (tmp_path / "dist").iterdir()
    site = tmp_path / "site"
    succeed(
        *("pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel), folder=tmp_path
    )
    said = run("tp_core.cli", "doctor", "--ranks", "0", "--json", folder=tmp_path, path=site).stdout
    report = json.loads(said)
    (found,) = [plugin for plugin in report["plugins"] if plugin["name"] == folder.name]
    assert found["distribution"] == folder.name
    assert found["contract"] == 1
    tests = succeed("pytest", "-q", "-p", "no:cacheprovider", "tests", folder=folder, path=site)
    return found, tests.splitlines()[-1]


@pytest.mark.takes(30)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "backend" else pytest.mark.nightly) for k in KINDS]
)
def test_a_new_plugin_is_published_found_and_right(kind, tmp_path):
    name = f"acme-{kind}"
    found, tests = published(new_plugin(kind, name, tmp_path), tmp_path)
    assert found["brings"] == {BROUGHT.get(kind, kind): [name]}
    assert " passed" in tests
    assert "xfailed" not in tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library", "brings"),
    [
        pytest.param(
            *("accelerate-for-tp", "accelerate", {"backend": ["accelerate"]}), marks=pytest.mark.nightly
        ),
        ("graphs-for-tp", "torch_geometric", {"collate adapter": ["graphs"]}),
    ],
)
def test_an_example_of_a_plugin_is_published_found_and_right(name, library, brings, tmp_path):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    folder = tmp_path / name  # a copy: building and testing leave files
    shutil.copytree(
        ROOT / "docs/examples/plugins" / name, folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    found, tests = published(folder, tmp_path)
    assert found["brings"] == brings
    assert " passed" in tests
    assert "xfailed" not in tests


@pytest.mark.nightly  # a type checker without its cache reads all of torch
def test_plugins_pass_linter_and_type_checker(tmp_path, monkeypatch):
    new = [new_plugin(kind, f"acme-{kind}", tmp_path) for kind in KINDS]
    examples = [tmp_path / folder.name for folder in (ROOT / "docs/examples/plugins").iterdir()]
    for example in examples:
        shutil.copytree(ROOT / "docs/examples/plugins" / example.name, example)
    succeed("ruff", "check", "--no-cache", ".", folder=tmp_path)
    succeed("ruff", "format", "--no-cache", "--check", ".", folder=tmp_path)
    # All at once, with the options that each has, as most of the time goes into reading torch.
    sources = [folder / "src" for folder in new] + sorted(ROOT.glob("packages/*/src"))
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\nmypy_path = {':'.join(map(str, sources))}\n")
    for folder in [*new, *examples]:
        config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["mypy"]
        assert config["strict"]
        assert config["files"] == ["src", "tests"]
    cache = tmp_path / "cache"
    files = [path for folder in new for path in folder.rglob("*.py")]
    succeed("mypy", "--cache-dir", cache, *files, folder=tmp_path)
    monkeypatch.setenv("MYPYPATH", ":".join(map(str, ["src", *sources])))
    for folder in examples:
        succeed("mypy", "--cache-dir", cache, folder=folder)
