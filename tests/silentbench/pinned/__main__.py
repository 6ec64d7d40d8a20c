"""Judge programs that run the code of other projects, in the versions that a report names.

``python -m tests.silentbench.pinned`` tries all of ``pinned.toml``, or ``--only NAME``, and prints what is
found. Each list of requirements is installed once, into a folder beside this environment.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "tests/silentbench/pinned.toml"
INSTALLED = Path.home() / ".cache/tp-silentbench"


@dataclass(frozen=True)
class Pinned:
    """A program that runs another project's code.

    Attributes:
        name: Its name.
        project: The project.
        report: The address of the report.
        title: The title of the report.
        program: The file, with a function ``cases``.
        place: A pattern of what names the true place of the fault.
        faulty: What the fault needs: requirements, and the number of the program's case.
        right: What the right form needs.
    """

    name: str
    project: str
    report: str
    title: str
    program: str
    place: str
    faulty: Mapping[str, Any]
    right: Mapping[str, Any]


def pinned() -> list[Pinned]:
    """Return all records."""
    return [Pinned(name, **record) for name, record in tomllib.loads(RECORDS.read_text("utf-8")).items()]


def installed(requires: Sequence[str]) -> Path:
    """Return the folder with the requirements, which are installed into it where it is not there yet."""
    folder = INSTALLED / hashlib.sha256(" ".join([sys.version, *requires]).encode()).hexdigest()[:16]
    if not folder.exists():
        half = folder.with_suffix(".half")
        # Without dependencies: torch would come with gigabytes, and all others are here.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(half)]
        subprocess.run([*install, *requires], check=True)
        half.rename(folder)
    return folder


def judged(one: Pinned, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `verify` says of a form of a program, in a process that has its requirements first."""
    path = [str(ROOT)]
    if form["requires"]:
        path.insert(0, str(installed(form["requires"])))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.silentbench.pinned._one", one.program, str(form["case"])]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{one.name} does not run:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.silentbench.pinned")
    parser.add_argument("--only", metavar="NAME", help="try this program")
    chosen = parser.parse_args()
    tried = [one for one in pinned() if chosen.only in (None, one.name)]
    if not tried:
        parser.error(f"there is no program {chosen.only!r}")
    for one in tried:
        print(f"{one.name}: with the fault {judged(one, one.faulty)}", flush=True)
        print(f"{one.name}: without it {judged(one, one.right)}", flush=True)


if __name__ == "__main__":
    main()
