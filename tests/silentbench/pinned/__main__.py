"""Run programs with the code of other projects, in the versions that a report names.

``python -m tests.silentbench.pinned`` tries all of ``pinned.toml``, or ``--only NAME...``, and prints what is
seen with the fault and without it. Each list of requirements is installed once, into a folder beside this
environment. Programs with a ``place`` are judged by `verify`; of the others each rank shows a value, which
the record has. Both are written for the documents.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tp_core.builders import load_function
from tp_core.ranks import RankPool

from tests.bench._results import FOLDER, machine, versions
from tests.silentbench._programs import programs

ROOT = Path(__file__).parents[3]
FILE = FOLDER / "silentbench-pinned.json"
RECORDS = ROOT / "tests/silentbench/pinned.toml"
INSTALLED = Path.home() / ".cache/tp-silentbench"
ENVIRON = {"TOKENIZERS_PARALLELISM": "false"}  # its threads would warn of each fork


@dataclass(frozen=True)
class Pinned:
    """A program that runs another project's code.

    Attributes:
        name: Its name.
        project: The project.
        report: The address of the report.
        title: The title of the report.
        kind: The kind of the fault.
        faulty: What the fault needs: requirements, and what each rank ``shows`` then; for `verify`, the
            number of the ``case``. Where no version has the fault mended, the case makes the difference.
        right: What the right form needs.
        program: The file, with a function ``cases`` or ``shown``; by default that of this name beside this.
        place: A pattern of what `verify` has to name as the place of the fault.
        alone: What is tried without a training step, where `verify` does not judge it.
    """

    name: str
    project: str
    report: str
    title: str
    kind: str
    faulty: Mapping[str, Any]
    right: Mapping[str, Any]
    program: str = ""
    place: str = ""
    alone: str = ""

    @property
    def file(self) -> str:
        return self.program or f"tests/silentbench/pinned/{self.name}.py"

    def is_as_recorded(self, seen: Mapping[str, Any]) -> bool:
        """Return whether both forms show what the record says, or `verify` names the place of the fault."""
        if self.place:
            return bool(re.search(self.place, seen["faulty"])) and not seen["right"]
        return bool(seen["faulty"] == self.faulty["shows"] and seen["right"] == self.right["shows"])


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


def seen(one: Pinned) -> dict[str, Any]:
    """Return what is seen of both forms of a program."""
    see = judged if one.place else shown
    return {"faulty": see(one, one.faulty), "right": see(one, one.right)}


def judged(one: Pinned, form: Mapping[str, Any]) -> str:
    """Return what `verify` says of a form of a program, in a process that has its requirements first."""
    path = [str(ROOT)]
    if form["requires"]:
        path.insert(0, str(installed(form["requires"])))
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "tests.silentbench.pinned._one", one.file, str(form["case"])]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{one.name} does not run:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    said: str = json.loads(done.stdout.splitlines()[-1])["said"]
    return said


def shown(one: Pinned, form: Mapping[str, Any]) -> list[Any]:
    """Return what each rank of a form of a program shows, on ranks that have its requirements first."""
    path = list(sys.path)
    if form["requires"]:
        sys.path.insert(0, str(installed(form["requires"])))  # a new rank has this process's path
    try:
        with RankPool(len(form["shows"]), timeout_s=600, environ=ENVIRON) as pool:
            shows: list[Any] = pool.run(_show, str(ROOT / one.file), form.get("case"))
    finally:
        sys.path[:] = path
    return shows


def _show(file: str, case: int | None) -> Any:
    dist.init_process_group("gloo")
    function = load_function(f"{file}:shown", example="shown")
    return function() if case is None else function(case)


def table(known: Sequence[Pinned], found: Mapping[str, Any]) -> str:
    """Return one row for each program, in Markdown."""
    rows = ["| kind | program | report | with the fault | without it | judged |", "|---|---|---|---|---|---|"]
    for one in known:
        faulty = _cell(one.faulty, found[one.name]["faulty"])
        right = _cell(one.right, found[one.name]["right"])
        link = f"[{one.project} {one.report.rpartition('/')[2]}]({one.report})"
        judge = "by `tp verify`" if one.place else f"no: {one.alone} alone"
        rows.append(f"| {one.kind} | `{one.name}` | {link} | {faulty} | {right} | {judge} |")
    return "\n".join(rows)


def _cell(form: Mapping[str, Any], values: Sequence[Any] | str) -> str:
    """Return the version of a form, and what its ranks show, or what `verify` says of it."""
    version = form["requires"][0].replace("==", " ") if form["requires"] else "as installed"
    if isinstance(values, str):
        said = f"`{values.partition(': it ')[0]}`" if values else "equal"
        return f"{version}: {said}"
    differ = any(value != values[0] for value in values)
    shown = " and ".join(f"`{value}`" for value in (values if differ else values[:1]))
    return f"{version}: {shown}"


def write(found: Mapping[str, Any]) -> None:
    """Write what is seen so far."""
    known = [one for one in pinned() if one.name in found]
    ordered = {one.name: found[one.name] for one in known}
    facts = {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
    reports = {one.report for one in known}
    sums = {
        "pinned": len(known),
        "judged by verify": sum(bool(one.place) for one in known),
        "re-made": sum(one.report in reports for one in programs()),
    }
    facts |= {"figures": sums, "programs": ordered, "table": table(known, ordered)}
    FILE.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.silentbench.pinned")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="try these programs")
    chosen = parser.parse_args()
    tried = [one for one in pinned() if chosen.only is None or one.name in chosen.only]
    if not tried:
        parser.error(f"there is no program {chosen.only!r}")
    found = json.loads(FILE.read_text(encoding="utf-8"))["programs"] if FILE.exists() else {}
    others = []
    for one in tried:
        facts = seen(one)
        print(f"{one.name}: with the fault {facts['faulty']}; without it {facts['right']}", flush=True)
        if not one.is_as_recorded(facts):
            others.append(one.name)
        else:
            found[one.name] = facts
            write(found)
    if others:
        parser.exit(1, f"not what pinned.toml says: {', '.join(others)}\n")


if __name__ == "__main__":
    main()
