"""A release by one command, in a repository of its own."""

import importlib.metadata
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from email.message import Message

import pytest

from tests.wheels import ROOT, build, environment, install, run

pytestmark = pytest.mark.slow

NEXT = "0.1.1"
URL = "https://github.com/someone/tp"


def git(root, *arguments):
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=800).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clean repository with what a release changes."""
    root = tmp_path / "repository"
    for path in [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "CITATION.cff"]:
        copy = root / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (root / "CHANGELOG.md").write_text("# Changelog\n\nHead.\n\n## Unreleased\n\n### Added\n\n- Wings.\n")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "First")
    return root


def release(root, *arguments):
    url = () if "--url" in arguments or "--notes" in arguments else ("--url", URL)
    command = [sys.executable, str(ROOT / "tools" / "release.py"), *arguments, *url, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def test_a_release_has_one_version_pins_a_changelog_a_tag_and_notes(repository):
    done = release(repository, NEXT)
    assert done.returncode == 0, done.stderr
    packages = sorted((repository / "packages").iterdir())
    assert {project(folder)["version"] for folder in packages} == {NEXT}
    for folder in packages:
        found = project(folder)
        extras = [d for extra in found.get("optional-dependencies", {}).values() for d in extra]
        pins = [d for d in [*found["dependencies"], *extras] if d.startswith("tp-")]
        assert all(pin.endswith(f"=={NEXT}") for pin in pins)
        assert bool(pins) == (folder.name not in {"tp-core", "tp-simulator"})
        assert found["urls"]["Homepage"] == URL
        assert set(found["urls"].values()) == {URL, f"{URL}/issues", f"{URL}/blob/main/CHANGELOG.md"}
    assert f"\nrepository-code: {URL}\n" in _read(repository, "CITATION.cff")
    assert re.search(
        rf"^version: {NEXT}\ndate-released: \d{{4}}-\d\d-\d\d$", _read(repository, "CITATION.cff"), re.M
    )
    assert re.search(
        rf"## Unreleased\n\n## {NEXT} - \d{{4}}-\d\d-\d\d\n\n### Added\n\n- Wings\.",
        _read(repository, "CHANGELOG.md"),
    )
    assert git(repository, "status", "--porcelain") == ""
    notes = "### Added\n\n- Wings.\n"
    assert git(repository, "tag", "--list", "--format=%(contents)", f"v{NEXT}").startswith(
        f"Release {NEXT}\n\n{notes}"
    )
    assert release(repository, NEXT, "--notes").stdout == notes
    assert "has nothing under '## Unreleased'" in release(repository, NEXT).stderr


def _read(root, name):
    return (root / name).read_text()


def test_a_project_that_does_not_say_where_it_is_public_is_not_released(repository):
    command = [sys.executable, str(ROOT / "tools/release.py"), NEXT, "--root", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 1
    said = "no release: tp-accelerate does not say where the project is public; give --url"
    assert done.stderr.startswith(said)
    assert "--url is the address" in release(repository, NEXT, "--url", "example").stderr
    assert release(repository, NEXT, "--url", "https://old.example/a/b").returncode == 0
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- More.\n")
    git(repository, "commit", "--quiet", "--all", "--message", "More")
    done = subprocess.run([*command[:2], "0.1.2", *command[3:]], text=True, check=False, timeout=800)
    assert done.returncode == 0  # the address is known
    found = project(repository / "packages" / "tp-core")
    assert (found["version"], found["urls"]["Homepage"]) == ("0.1.2", "https://old.example/a/b")


def test_a_dry_run_shows_everything_and_changes_nothing(repository):
    before = git(repository, "rev-parse", "HEAD")
    done = release(repository, "1.0.0", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert '+version = "1.0.0"' in done.stdout
    assert "tp-core[cli]==1.0.0" in done.stdout
    assert "tag v1.0.0, with the notes:\n\n### Added" in done.stdout
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "rev-parse", "HEAD") == before
    assert git(repository, "tag") == ""


@pytest.mark.parametrize(
    ("spoil", "version", "said"),
    [
        (lambda root: None, "0.0.9", "has version 0.1.0 already, and 0.0.9 is before it"),
        (lambda root: None, "0.2", "a version is X.Y.Z, got '0.2'"),
        (lambda root: (root / "new").write_text(""), NEXT, "changes that are not committed:\n?? new"),
        (lambda root: git(root, "tag", f"v{NEXT}"), NEXT, f"v{NEXT} is there already"),
        (lambda root: git(root, "switch", "--quiet", "-c", "x"), NEXT, "made of main, and this is x"),
        (lambda root: (root / "CHANGELOG.md").write_text("\n## Unreleased\n"), NEXT, "has nothing under"),
        (lambda root: (root / "CHANGELOG.md").write_text("\n"), NEXT, "not exactly one section"),
    ],
)
def test_what_must_not_be_released_is_not(repository, spoil, version, said):
    spoil(repository)
    before = git(repository, "status", "--porcelain"), git(repository, "tag")
    done = release(repository, version)
    assert done.returncode == 1
    assert "no release: " in done.stderr
    assert said in done.stderr
    assert (git(repository, "status", "--porcelain"), git(repository, "tag")) == before


def test_notes_of_a_version_that_is_not_there_are_an_error(repository):
    done = release(repository, "9.9.9", "--notes")
    assert (done.returncode, done.stderr) == (1, "no release: CHANGELOG.md has no section of 9.9.9\n")


def test_a_newer_package_refuses_an_older_core_at_install(repository, tmp_path):
    index, packages = tmp_path / "index", repository / "packages"
    shutil.copytree(ROOT / "packages", packages, dirs_exist_ok=True)
    build(index, [packages / "tp-core"])  # as it is today
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "Sources")
    assert release(repository, NEXT).returncode == 0
    build(index, [packages / "tp-tuple"])
    python = environment(["tp-tuple"], tmp_path / "environment")
    with pytest.raises(RuntimeError, match=f"requirement tp-core=={NEXT}"):
        install(python, index, "tp-tuple")
    build(index, [packages / "tp-core"])
    install(python, index, "tp-tuple")
    code = "import tp_core, tp_tuple; print(tp_core.__version__, tp_tuple.__version__)"
    assert run(python, "-c", code).split() == [NEXT, NEXT]


def test_the_site_links_versions_once_it_has_an_address(monkeypatch):
    jinja2 = pytest.importorskip("jinja2")
    monkeypatch.delenv("TP_DOCS_URL", raising=False)
    conf = str(ROOT / "docs" / "conf.py")
    assert "html_sidebars" not in runpy.run_path(conf)
    monkeypatch.setenv("TP_DOCS_URL", "https://tp.example/docs/")
    found = runpy.run_path(conf)
    assert "versions.html" in found["html_sidebars"]["**"]
    template = jinja2.Template((ROOT / "docs" / "_templates" / "versions.html").read_text())
    page = template.render(release="0.1.0", **found["html_context"])
    assert '<a href="https://tp.example/docs/">newest</a>' in page


def test_the_site_links_sources_once_they_have_an_address(monkeypatch):
    conf = str(ROOT / "docs" / "conf.py")
    about = Message()
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: about)
    assert "html_theme_options" not in runpy.run_path(conf)
    about["Project-URL"] = "Homepage, https://forge.example/you/tp"
    found = runpy.run_path(conf)["html_theme_options"]
    assert found["source_repository"] == "https://forge.example/you/tp/"
