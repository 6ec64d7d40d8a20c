"""Certify how programs of today's libraries resume: ``python -m tests.certificates``.

Its environment is that of the benchmarks, which has the libraries. All rows are tried, or with ``--only``
those with a word in them. Their certificates are printed, and written into the file from which the documents
have their table. There a row that does not train now stays as it was.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from typing import Any

from tp_verify._report import Finding

from tests.bench._results import FOLDER, machine, versions

FILE = FOLDER / "certificates.json"
PROGRAMS = FOLDER.parent / "examples" / "resume"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"]
DISTRIBUTIONS = ["torch", "accelerate", "lightning", "transformers", "tp-trainer"]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        stack: The distribution whose training it is.
        program: The program, beside the others.
        how: What it is, in words.
        options: Options of ``tp verify --resume``.
        arguments: The program's own.
    """

    stack: str
    program: str
    how: str
    options: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def command(self) -> list[str]:
        """Return the command line."""
        launched = TORCHRUN if "--ranks" in self.options and "{ranks}" not in self.arguments else []
        words = [sys.executable, *launched, self.program, "{folder}", *self.arguments]
        verify = [sys.executable, "-m", "tp_core.cli", "verify", "--resume", "--json"]
        return [*verify, "--timeout-s", "300", *self.options, "--", *words]


def rows() -> list[Row]:
    """Return all rows."""
    plain = ["--dropout", "0"]
    found = []
    for stack, program, more in (
        ("torch", "torch_loop.py", []),
        ("accelerate", "accelerate_loop.py", ["--seedable"]),
        ("transformers", "transformers_fit.py", []),
        ("tp-trainer", "tp_fit.py", []),
    ):
        if more:
            found.append(Row(stack, program, "1 rank, a plain loader", [], []))
        words = ", a seedable sampler" if more else ""
        found += [
            Row(stack, program, f"1 rank{words}", [], more),
            Row(stack, program, f"1 rank, inside a save{words}", ["--kill-in-save"], more),
            Row(stack, program, f"2 ranks{words}", ["--ranks", "2"], more),
            Row(stack, program, f"2 ranks, then 1{words}", ["--ranks", "2,1"], [*more, *plain]),
        ]
    whole = ["--seedable", "--whole"]
    found.append(
        Row(
            "accelerate",
            "accelerate_loop.py",
            "1 rank, inside a save that is renamed",
            ["--kill-in-save"],
            whole,
        )
    )
    devices = ["--devices", "{ranks}"]
    found += [
        Row("lightning", "lightning_fit.py", "1 rank, a plain loader"),
        Row("lightning", "lightning_fit.py", "1 rank, torchdata's loader", [], ["--stateful"]),
        Row(
            "lightning",
            "lightning_fit.py",
            "1 rank, inside a save",
            ["--kill-in-save"],
            ["--stateful", *plain],
        ),
        Row("lightning", "lightning_fit.py", "2 ranks", ["--ranks", "2"], [*devices, "--stateful"]),
        Row(
            "lightning",
            "lightning_fit.py",
            "2 ranks, then 1",
            ["--ranks", "2,1"],
            [*devices, "--stateful", *plain],
        ),
        Row("tp-trainer", "tp_fit.py", "1 rank, by SIGTERM", ["--sigterm"]),
    ]
    return sorted(found, key=lambda row: DISTRIBUTIONS.index(row.stack))


def certified(row: Row) -> dict[str, Any]:
    """Return what ``tp verify --resume`` says of a row."""
    done = subprocess.run(
        row.command(), cwd=PROGRAMS, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout:
        error = json.loads(done.stderr.strip().splitlines()[-1])["error"]
        return {"ok": False, "text": error["message"], "reports": []}
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def cell(facts: dict[str, Any]) -> str:
    """Return the outcome of a row in Markdown."""
    reports = facts["reports"]
    if not reports:
        return f"not tried: {facts['text']}"
    wrong = [report for report in reports if not report["ok"]]
    if not wrong:
        unseen = [line for line in reports[0]["not_covered"] if line.startswith("samples")]
        return f"**equal**, {len(reports)} of {len(reports)} kills{'; samples not seen' if unseen else ''}"
    said = "; ".join(str(Finding(**one)) for one in wrong[0]["findings"])
    if len(wrong) == len(reports):
        return f"no: {said}"
    kill = wrong[0]["name"].partition(", resumed")[0]
    return f"no, {len(wrong)} of {len(reports)} kills: {kill}: {said}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return a row for each trial, in Markdown."""
    lines = ["| training | program | killed | resumed as the undisturbed run |", "|---|---|---|---|"]
    for row in rows():
        facts = found.get(f"{row.stack}, {row.how}")
        if facts is None:
            continue
        version = metadata.version(row.stack).partition("+")[0]
        outcome = cell(facts).replace("|", "\\|")
        lines.append(f"| {row.stack} {version} | `{row.program}` | {row.how} | {outcome} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.certificates")
    parser.add_argument("--only", metavar="WORD", help="try rows with this word")
    chosen = parser.parse_args()
    for row in rows():
        name = f"{row.stack}, {row.how}"
        if chosen.only and chosen.only not in f"{name} {row.program}":
            continue
        facts = certified(row)
        print(f"== {name}\n{facts['text']}\n", flush=True)
        if facts["reports"]:
            write(name, facts)


def write(name: str, certificates: dict[str, Any]) -> None:
    """Put a row into the file, beside the others."""
    known: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    known[name] = certificates
    names = [f"{row.stack}, {row.how}" for row in rows()]
    ordered = {name: known[name] for name in names if name in known}
    figures = {
        "kills": sum(len(one["reports"]) for one in ordered.values()),
        "rows": len(ordered),
        "rows equal": sum(one["ok"] for one in ordered.values()),
    }
    facts: dict[str, Any] = {
        "measured": date.today().isoformat(),
        "machine": machine(),
        "versions": versions() | {name: metadata.version(name) for name in DISTRIBUTIONS},
    }
    facts |= {"figures": figures, "rows": ordered, "table": table(ordered)}
    FILE.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
