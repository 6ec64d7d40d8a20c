"""tp new-plugin writes a whole package, or refuses before it has written anything."""

import ast
import json
import re
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tp_core.cli._main import run
from tp_core.cli._new_plugin import Kind, write_plugin
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Session, Verdict
from tp_core.testing import fake_distribution


@pytest.mark.parametrize("kind", list(Kind))
def test_a_new_plugin_is_a_whole_package_under_its_own_name(kind, tmp_path):
    folder = write_plugin(kind, "Acme_Things", tmp_path)
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
    assert project["entry-points"]["tp.plugins"] == {"acme-things": "acme_things._plugin"}
    assert {"tp-plugin", f"tp-plugin-{kind}"} <= set(project["keywords"])


def test_it_requires_the_tp_core_that_wrote_it(tmp_path):
    folder = write_plugin(Kind.ENGINE, "acme", tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["testing"]
    for text in [*project["dependencies"], *(extra for extra in extras if extra.startswith("tp-"))]:
        requirement = Requirement(text)
        here = Version(version("tp-core"))
        assert here in requirement.specifier
        assert Version(f"{here.major}.{here.minor + 1}") not in requirement.specifier


def test_a_kind_in_the_name_is_not_said_twice(tmp_path):
    folder = write_plugin(Kind.CALLBACK, "acme-callback", tmp_path)
    assert "class AcmeCallback(Callback):" in (folder / "src/acme_callback/callback.py").read_text()


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
        ("doctor", "tp-core brings a command 'doctor'"),
        ("new-plugin", "tp-core brings a command 'new-plugin'"),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_and_nothing_is_written(name, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        write_plugin(Kind.COMMAND, name, tmp_path, plugins=PluginRegistry(environ={}))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_another_plugin_of_the_kind_has_is_refused(tmp_path):
    class Taken(Backend):
        name = "taken"

        def assess(self, job):
            return Verdict.fits(1, "it is for tests")

        def open(self, job):
            return Session(job)

    plugins = PluginRegistry(environ={})
    plugins.register(Taken())
    with pytest.raises(ConfigError, match="taken brings a backend 'taken'"):
        write_plugin(Kind.BACKEND, "taken", tmp_path, plugins=plugins)
    with pytest.raises(ConfigError, match="tp-dp-gather brings a backend 'dp-gather'"):
        write_plugin(Kind.BACKEND, "dp_gather", tmp_path, plugins=plugins)
    write_plugin(Kind.LOGGER, "taken", tmp_path, plugins=plugins)


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_what_is_there_is_left_as_it_is(there, tmp_path):
    place = tmp_path / "acme"
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("mine")
    else:
        place.symlink_to("nowhere")
    with pytest.raises(ConfigError, match="is there already; take another name"):
        write_plugin(Kind.BACKEND, "acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["acme"]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left"):
        write_plugin(Kind.BACKEND, "acme", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["new-plugin", "engine", "acme", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(tmp_path / "acme")
    assert "src/acme/engine.py" in facts["files"]
    assert run(["new-plugin", "engine", "acme"]) == 2
    assert capsys.readouterr().err.startswith("tp new-plugin: ")
    assert run(["new-plugin", "engine", "other", "--into", "nowhere"]) == 2
    assert "--into must be a folder" in capsys.readouterr().err
    assert run(["new-plugin", "motor", "other"]) == 2
    assert "'engine'" in capsys.readouterr().err
    assert run(["new-plugin", "engine", "other"]) == 0
    assert "tp doctor" in capsys.readouterr().out


def test_a_broken_plugin_does_not_keep_others_from_being_written(tmp_path):
    with fake_distribution(
        tmp_path / "site", "tp-bad", entry_points={"bad": "bad_plugin"}, modules={"bad_plugin": "1 / 0"}
    ):
        write_plugin(Kind.ENGINE, "acme", tmp_path, plugins=PluginRegistry(environ={}))
