"""tp new-plugin writes a whole package, or refuses before it has written anything."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tp_core.plugins import Backend, Session, Verdict, registry
from tp_testing import fake_distribution

from tests.run_tp import KINDS, new_plugin, run, seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_is_a_whole_package_under_its_own_name(kind, tmp_path):
    folder = new_plugin(kind, "Acme_Things", tmp_path)
    assert folder == tmp_path / "acme-things"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "pyproject.toml", "src/acme_things/py.typed", f"tests/test_{kind}.py"} <= set(files)
    for path in files.values():
        text = path.read_text()
        assert not re.search("my[-_ ]?plugin", text, re.IGNORECASE)
        if path.suffix == ".py":
            ast.parse(text)
    project = tomllib.loads(files["pyproject.toml"].read_text())["project"]
    assert project["name"] == "acme-things"
    assert project["entry-points"]["tp.plugins"] == {"acme-things": "acme_things"}
    assert {"tp-plugin", f"tp-plugin-{kind}"} <= set(project["keywords"])


@pytest.mark.parametrize("kind", KINDS)
def test_its_module_imports_no_torch(kind, tmp_path):
    folder = new_plugin(kind, "acme", tmp_path)
    code = "import sys, acme; print('torch' in sys.modules)"
    path = os.pathsep.join([str(folder / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "False\n"


def test_it_requires_the_tp_core_that_wrote_it(tmp_path):
    folder = new_plugin("adapter", "acme", tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["testing"]
    for text in [*project["dependencies"], *(extra for extra in extras if extra.startswith("tp-"))]:
        requirement = Requirement(text)
        here = Version(version("tp-core"))
        assert here in requirement.specifier
        assert Version(f"{here.major}.{here.minor + 1}") not in requirement.specifier


def test_a_kind_in_the_name_is_not_said_twice(tmp_path):
    folder = new_plugin("adapter", "acme-adapter", tmp_path)
    assert "class AcmeAdapter(CollateAdapter):" in (folder / "src/acme_adapter/__init__.py").read_text()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "begins with a letter"),
        ("3d", "begins with a letter"),
        ("-acme", "begins with a letter"),
        ("acme-", "ends with a letter or digit"),
        ("acme/../../else", "letters, digits, '-', '_' and '.'"),
        ("acmé", "letters, digits, '-', '_' and '.'"),
        ("two words", "letters, digits, '-', '_' and '.'"),
        ("acme\n", "letters, digits, '-', '_' and '.'"),
        ("class", "a word of the language"),
        ("Json", "hide 'json' of Python's standard library"),
        ("tp.tuple", "'tp-tuple' is a distribution of this project"),
        ("Typing_Extensions", "'typing-extensions' is installed already"),
        ("yaml", "hide 'yaml', which is installed"),
        ("tuple", "tp-tuple brings a adapter 'tuple'"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_and_nothing_is_written(name, reason, tmp_path, capsys):
    assert run(["new-plugin", "adapter", "--into", str(tmp_path), "--", name]) == 2
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_another_plugin_of_the_kind_has_is_refused(tmp_path, capsys):
    class Taken(Backend):
        name = "taken"

        def assess(self, job):
            return Verdict.fits(1, "it is for tests")

        def open(self, job):
            return Session(job)

    registry.register(Taken())
    try:
        assert run(["new-plugin", "backend", "taken", "--into", str(tmp_path)]) == 2
        assert "taken brings a backend 'taken'" in capsys.readouterr().err
        new_plugin("adapter", "taken", tmp_path)
    finally:
        registry.unregister("taken")
    assert run(["new-plugin", "backend", "dp_gather", "--into", str(tmp_path)]) == 2
    assert "tp-dp-gather brings a backend 'dp-gather'" in capsys.readouterr().err


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_what_is_there_is_left_as_it_is(there, tmp_path, capsys):
    place = tmp_path / "acme"
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nowhere")
    assert run(["new-plugin", "backend", "acme", "--into", str(tmp_path)]) == 2
    assert "is there already; take another name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["acme"]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    assert run(["new-plugin", "backend", "acme", "--into", str(tmp_path)]) == 2
    assert re.search(r"cannot be written: .*No space left", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["new-plugin", "adapter", "acme", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(tmp_path / "acme")
    assert "src/acme/__init__.py" in facts["files"]
    assert run(["new-plugin", "adapter", "acme"]) == 2
    assert capsys.readouterr().err.startswith("tp new-plugin: ")
    assert run(["new-plugin", "adapter", "other", "--into", "nowhere"]) == 2
    assert "--into must be a folder" in capsys.readouterr().err
    assert run(["new-plugin", "motor", "other"]) == 2
    assert "'adapter'" in capsys.readouterr().err
    assert run(["new-plugin", "adapter", "other"]) == 0
    assert "tp doctor" in capsys.readouterr().out


def test_a_broken_plugin_does_not_keep_others_from_being_written(tmp_path):
    points, modules = {"bad": "bad_plugin"}, {"bad_plugin": "1 / 0"}
    with seen(fake_distribution(tmp_path / "site", "tp-bad", entry_points=points, modules=modules)):
        new_plugin("adapter", "acme", tmp_path)
