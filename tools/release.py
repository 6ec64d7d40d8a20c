"""Make a release: ``hatch run release 0.2.0``, or with ``--dry-run`` to see what it would do.

All distributions have one version. It goes into each ``pyproject.toml``, into the pins of siblings (a package
takes exactly the tp-core of its own version), into ``CITATION.cff``, and over what ``CHANGELOG.md`` has under
"Unreleased"; then there are a commit and a tag whose message are the notes. Publishing is what the forge's
workflow does with the tag. ``--notes 0.2.0`` prints the notes of a release that was made.

The first release needs ``--url https://github.com/OWNER/NAME``, where the repository is public: from then on
``[project.urls]`` of each package and the citation have it. Without an address there is no release.
"""

import argparse
import datetime as dt
import difflib
import re
import subprocess
import sys
from pathlib import Path

_UNRELEASED = "## Unreleased"
_VERSION = re.compile(r'^version = "([^"]*)"$', re.MULTILINE)
_PIN = re.compile(r'"(tp-[a-z-]+(?:\[[a-z,]+\])?)==[^"]*"')


class ReleaseError(Exception):
    """Why there is no release."""


def main(arguments: list[str] | None = None) -> int:
    """Release, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="X.Y.Z")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, and change nothing")
    parser.add_argument("--notes", action="store_true", help="print the notes of a release that was made")
    parser.add_argument("--url", help="where the repository is public, for the metadata")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    root: Path = given.root
    try:
        if given.notes:
            print(notes_of((root / "CHANGELOG.md").read_text(), given.version))
            return 0
        changes = changed_files(root, given.version, today=dt.datetime.now(dt.UTC).date(), url=given.url)
        check_repository(root, given.version)
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    notes = notes_of(changes[root / "CHANGELOG.md"], given.version)
    if given.dry_run:
        for path, text in changes.items():
            _show(path.relative_to(root), path.read_text(), text)
        print(f"tag v{given.version}, with the notes:\n\n{notes}")
        return 0
    for path, text in changes.items():
        path.write_text(text)
    title = f"Release {given.version}"
    _git(root, "add", *(str(path.relative_to(root)) for path in changes))
    _git(root, "commit", "--quiet", "--message", title)
    _git(
        root,
        "tag",
        "--annotate",
        "--cleanup=verbatim",
        f"v{given.version}",
        "--message",
        f"{title}\n\n{notes}",
    )
    print(f"tagged v{given.version}; to publish it: git push --follow-tags")
    return 0


def changed_files(root: Path, version: str, *, today: dt.date, url: str | None = None) -> dict[Path, str]:
    """Return the files that change, with their new text.

    Raises:
        ReleaseError: The version is not one that can come next, nothing is to be released, or it is not known
            where the repository is public.
    """
    if url is not None and re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", url) is None:
        msg = f"--url is the address of the repository, as https://github.com/OWNER/NAME, got {url!r}"
        raise ReleaseError(msg)
    numbers = _numbers(version)
    changes = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        text = path.read_text()
        (current,) = _VERSION.findall(text)
        if _numbers(current) > numbers:
            msg = f"{path.parent.name} has version {current} already, and {version} is before it"
            raise ReleaseError(msg)
        text = _VERSION.sub(f'version = "{version}"', text)
        changes[path] = _with_urls(path, _PIN.sub(rf'"\g<1>=={version}"', text), url)
    citation = root / "CITATION.cff"
    text = re.sub(r"^version: .*$", f"version: {version}", citation.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^date-released: .*\n", "", text, flags=re.MULTILINE)
    if url is not None:
        text = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^(version: .*)$", rf"\g<1>\nrepository-code: {url}", text, flags=re.MULTILINE)
    changes[citation] = re.sub(
        r"^(version: .*)$", rf"\g<1>\ndate-released: {today}", text, flags=re.MULTILINE
    )
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    if text.count(f"\n{_UNRELEASED}\n") != 1:
        msg = f"CHANGELOG.md has not exactly one section {_UNRELEASED!r}"
        raise ReleaseError(msg)
    if not _section(text, _UNRELEASED):
        msg = f"CHANGELOG.md has nothing under {_UNRELEASED!r}"
        raise ReleaseError(msg)
    changes[changelog] = text.replace(f"\n{_UNRELEASED}\n", f"\n{_UNRELEASED}\n\n## {version} - {today}\n")
    return changes


def _with_urls(path: Path, text: str, url: str | None) -> str:
    """Return the text of a pyproject.toml with the addresses of the project.

    Raises:
        ReleaseError: It has none, and none is given.
    """
    if url is None:
        if "[project.urls]" not in text:
            msg = (
                f"{path.parent.name} does not say where the project is public; give "
                f"--url https://github.com/OWNER/NAME once"
            )
            raise ReleaseError(msg)
        return text
    pages = {
        "Homepage": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
    }
    table = "[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())
    text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^(?=\[tool\.)", f"{table}\n", text, count=1, flags=re.MULTILINE)


def check_repository(root: Path, version: str) -> None:
    """Make sure that what is released is what is committed, and was not released before.

    Raises:
        ReleaseError: It is not, or it was.
    """
    if changed := _git(root, "status", "--porcelain"):
        msg = f"there are changes that are not committed:\n{changed}"
        raise ReleaseError(msg)
    if _git(root, "tag", "--list", f"v{version}"):
        msg = f"v{version} is there already; a version is released once"
        raise ReleaseError(msg)
    branch = _git(root, "branch", "--show-current").strip()
    if branch != "main":
        msg = f"releases are made of main, and this is {branch or 'no branch'}"
        raise ReleaseError(msg)


def notes_of(changelog: str, version: str) -> str:
    """Return what the changelog has of a version.

    Raises:
        ReleaseError: It has nothing.
    """
    notes = _section(changelog, f"## {version} - ")
    if not notes:
        msg = f"CHANGELOG.md has no section of {version}"
        raise ReleaseError(msg)
    return notes


def _section(text: str, heading: str) -> str:
    found = re.search(rf"^{re.escape(heading)}.*\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    return "" if found is None else found[1].strip()


def _numbers(version: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d+\.\d+\.\d+", version) is None:
        msg = f"a version is X.Y.Z, got {version!r}"
        raise ReleaseError(msg)
    return tuple(map(int, version.split(".")))


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"git {arguments[0]} failed: {done.stderr.strip()}"
        raise ReleaseError(msg)
    return done.stdout


def _show(name: Path, old: str, new: str) -> None:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(name), str(name), n=1, lineterm="")
    print(*lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
