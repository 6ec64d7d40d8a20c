"""Whole steps of models of many families on pretended ranks: ``python -m tests.bench.shard.many_ranks``.

Each row has the CPU seconds, of one thread, in which a plan is found and proven. ``--only`` measures
some families; rows of the others stay as they are in the file.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from datetime import date
from typing import Any

import torch

from tests.bench._results import FOLDER, machine, versions
from tests.tp_shard.verify.families import FAMILIES, HEADS, report_of

FILE = FOLDER / "shard-many-ranks.json"
RANKS = (64, 8)


def measured(family: str, ranks: int) -> dict[str, Any]:
    """Return what a report says, and the CPU seconds that it took."""
    begin = time.process_time()
    report = report_of(family, ranks)
    seconds = time.process_time() - begin
    return {"ok": report.ok, "fault": str(report.fault or ""), "seconds": round(seconds, 1)}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one row for each family, in Markdown."""
    numbers = sorted(RANKS)
    lines = ["| family | " + " | ".join(f"{number} ranks" for number in numbers) + " |"]
    lines.append("|---" * (len(numbers) + 1) + "|")
    for family in FAMILIES:
        cells = [cell(rows.get(f"{family}, {number}")) for number in numbers]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not tried"
    if row["ok"]:
        return f"equal, {row['seconds']:.1f} s"
    return f"parts: {row['fault']}"


def write(name: str, row: Mapping[str, Any]) -> None:
    """Put a row into the file, with the figures of all."""
    known = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else {}
    known[name] = row
    rows = {f"{family}, {ranks}": known.get(f"{family}, {ranks}") for ranks in RANKS for family in FAMILIES}
    tried = {name: row for name, row in rows.items() if row is not None}
    of_most = [row["seconds"] for name, row in tried.items() if name.endswith(f", {max(RANKS)}")]
    figures = {
        "families": len(FAMILIES),
        "heads": HEADS,
        "rows": len(tried),
        "rows equal": sum(row["ok"] for row in tried.values()),
    }
    if of_most:
        figures |= {"longest": max(of_most), "median": statistics.median(of_most)}
    facts = {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
    facts |= {"figures": figures, "rows": tried, "table": table(tried)}
    FILE.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shard.many_ranks")
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES], default=[*FAMILIES], metavar="FAMILY")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    import transformers  # noqa: F401 - before seconds are counted

    for ranks in RANKS:
        for family in chosen.only:
            row = measured(family, ranks)
            print(f"{family}, {ranks} ranks: {cell(row)}", flush=True)
            write(f"{family}, {ranks}", row)


if __name__ == "__main__":
    main()
