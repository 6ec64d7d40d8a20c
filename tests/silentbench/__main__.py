"""Try judges of parallel training on programs with known faults: ``python -m tests.silentbench``.

``--only NAME`` tries one program, and prints what each judge says; without it, all are tried, and the figures
and the table that the documents quote are written. ``--judge`` leaves out the others.
"""

import argparse
import json
from collections import Counter
from datetime import date
from typing import Any

import torch
from tp_core.ranks import RankPool

from tests.bench._results import FOLDER, machine, versions
from tests.silentbench._judges import JUDGES, by_verify
from tests.silentbench._programs import RANKS, Program, programs

FILE = FOLDER / "silentbench.json"
LOWER = (torch.float32, torch.bfloat16, torch.float16)


def trials(program: Program, judges: list[str], pool: RankPool) -> dict[str, Any]:
    """Return what each judge says of a program's faulty form, and of its right one."""
    facts: dict[str, Any] = {"kind": program.kind, "runs": program.runs, "lines": program.lines()}
    for name in judges:
        faulty = JUDGES[name](program, pool, right=False)
        rights = {"": JUDGES[name](program, pool, right=True)}
        if name == "tp verify":
            rights |= {
                str(t).removeprefix("torch."): by_verify(program, pool, right=True, dtype=t) for t in LOWER
            }
        facts[name] = {
            "found": faulty.found,
            "placed": faulty.is_placed,
            "said": faulty.said,
            "seconds": round(faulty.seconds, 2),
            "right": len(rights),
            "false alarms": {kind: one.said or "found" for kind, one in rights.items() if one.found},
        }
        print(f"{program.name}, {name}: {facts[name]}", flush=True)
    return facts


def figures(found: dict[str, dict[str, Any]], judges: list[str]) -> dict[str, float]:
    """Return the sums over all programs."""
    sums: Counter[str] = Counter({"programs": len(found)})
    sums["torch's own"] = sum(facts["runs"] == "torch" for facts in found.values())
    for name in judges:
        for facts in found.values():
            one = facts[name]
            sums[f"{name}, found"] += one["found"]
            sums[f"{name}, placed"] += one["placed"]
            sums[f"{name}, right forms"] += one["right"]
            sums[f"{name}, false alarms"] += len(one["false alarms"])
            sums[f"{name}, seconds"] += one["seconds"] / len(found)
    return dict(sums)


def table(tried: list[Program], found: dict[str, dict[str, Any]]) -> str:
    """Return one row for each program, in Markdown."""
    rows = ["| kind | program | report | `tp verify` names | loss curves |", "|---|---|---|---|---|"]
    for program in tried:
        of_verify, of_curves = found[program.name]["tp verify"], found[program.name]["loss curves"]
        named = f"`{of_verify['said'].partition(': it ')[0]}`" if of_verify["found"] else "nothing"
        if of_verify["found"] and not of_verify["placed"]:
            named += ", another place"
        number = program.report.rpartition("/")[2]
        link = f"[{program.project} {number}]({program.report})"
        seen = "part" if of_curves["found"] else "do not part"
        rows.append(f"| {program.kind} | `{program.name}` | {link} | {named} | {seen} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.silentbench")
    parser.add_argument("--only", metavar="NAME", help="try this program")
    parser.add_argument("--judge", choices=JUDGES, help="ask this judge")
    chosen = parser.parse_args()
    tried = [one for one in programs() if chosen.only in (None, one.name)]
    if not tried:
        parser.error(f"there is no program {chosen.only!r}")
    judges = [chosen.judge] if chosen.judge else list(JUDGES)
    with RankPool(RANKS, timeout_s=600) as pool:
        found = {program.name: trials(program, judges, pool) for program in tried}
    if chosen.only or chosen.judge:
        return
    facts = {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
    facts |= {"figures": figures(found, judges), "programs": found, "table": table(tried, found)}
    FILE.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
