"""Try judges of parallel training on programs with known faults: ``python -m tests.silentbench``.

``--only NAME`` tries one program, and prints what each judge says; without it, all are tried, and the figures
and the table that the documents quote are written, program by program. ``--judge`` leaves out the others, and
keeps what they have said. ``--blind`` has `tp verify` judge the programs of the blind test, and keeps what it
said of them at first.
"""

import argparse
import ast
import inspect
import json
import statistics
from collections import Counter
from datetime import date
from typing import Any

import torch
from tp_core.ranks import RankPool

from tests.bench._results import FOLDER, machine, versions
from tests.silentbench._judges import JUDGES, Outcome, by_verify
from tests.silentbench._programs import RANKS, Program, blind_programs, programs
from tests.silentbench._runs import curve_of_one_device
from tests.silentbench._types import FUNCTIONS

FILE = FOLDER / "silentbench.json"
BLIND_FILE = FOLDER / "silentbench-blind.json"
OWN = "its own"  # the type that a program asks for: float64, or float32 where its fault is one of precision
LOOP = len(inspect.getsource(curve_of_one_device).splitlines()) - 2  # without its name and docstring
TYPES = {OWN: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def trials(program: Program, name: str, pool: RankPool) -> dict[str, Any]:
    """Return what a judge says of the two forms of a program, in each type that it tries."""
    facts = {}
    for kind, dtype in TYPES.items():
        if name == "tp verify":
            faulty = by_verify(program, pool, right=False, dtype=dtype)
            facts[kind] = outcome(faulty, by_verify(program, pool, right=True, dtype=dtype))
        elif kind == OWN:
            faulty = JUDGES[name](program, pool, right=False)
            facts[kind] = outcome(faulty, JUDGES[name](program, pool, right=True))
    return facts


def outcome(faulty: Outcome, right: Outcome) -> dict[str, Any]:
    """Return what a judge says of the two forms of a program in one type."""
    if faulty.not_for or right.not_for:
        return {"not for it": faulty.not_for or right.not_for}
    return {
        "found": faulty.found,
        "placed": faulty.is_placed,
        "said": faulty.said,
        "seconds": round(faulty.seconds, 2),
        "false alarm": (right.said or "found") if right.found else "",
    }


def lines_for(program: Program, name: str) -> int:
    """Return the lines that a user of a judge writes beside the training, which has to be there anyhow."""
    module = ast.parse(program.file.read_text(encoding="utf-8"))
    # The functions that return the arguments of `verify`.
    cases = [one for one in module.body if isinstance(one, ast.FunctionDef) and one.name == "case"]
    case = sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in cases)
    if name == "tp verify":
        return case
    if name == "loss curves":
        return LOOP + 1
    declared = [one for one in module.body if isinstance(one, ast.ClassDef) and one.name in FUNCTIONS]
    return {"spmd-types": 4 + 3 * len(declared), "DebugMode": 4, "CommDebugMode": 3}[name]


def figures(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the sums over all programs.

    A right form counts in a type in which the judge finds the faulty form: there it could have been accused.
    """
    sums: Counter[str] = Counter({"programs": len(found)})
    sums["torch's own"] = sum(facts["runs"] == "torch" for facts in found.values())
    for facts in found.values():
        for name in facts.keys() & JUDGES.keys():
            for kind, one in facts[name].items():
                if "not for it" in one:
                    sums[f"{name}, {kind}, not for it"] += 1
                    continue
                sums[f"{name}, {kind}, tried"] += 1
                sums[f"{name}, {kind}, found"] += one["found"]
                sums[f"{name}, {kind}, told apart"] += one["found"] and not one["false alarm"]
                sums[f"{name}, {kind}, placed"] += one["placed"]
                sums[f"{name}, {kind}, false alarms"] += bool(one["false alarm"])
                sums[f"{name}, {kind}, seconds"] += one["seconds"]
                sums[f"{name}, right forms"] += 1
                sums[f"{name}, right forms told apart"] += one["found"]
                sums[f"{name}, false alarms"] += bool(one["false alarm"])
    for figure in [one for one in sums if one.endswith(", seconds")]:
        sums[figure] /= sums[figure.removesuffix("seconds") + "tried"]
    sums.update(dict.fromkeys((f"{name}, {OWN}, not for it" for name in JUDGES), 0))  # each has the figure
    for name in JUDGES:
        sums[f"{name}, lines"] = statistics.median(facts["lines for"][name] for facts in found.values())
    return {**sums, "lines of a program": statistics.median(facts["lines"] for facts in found.values())}


def table(tried: list[Program], found: dict[str, dict[str, Any]]) -> str:
    """Return one row for each program, in Markdown."""
    others = ["loss curves", "spmd-types"]  # DebugMode is for one program
    rows = [
        f"| program | report | `tp verify` names | {' | '.join(others)} | lines |",
        "|---|---|---|" + "---|" * len(others) + "---|",
    ]
    for program in tried:
        facts = found[program.name]
        place = "not tried"
        if "tp verify" in facts:
            said = facts["tp verify"][OWN]
            place = f"{named(said)}, {said['seconds']:.1f} s"
        seen = [cell(facts[name][OWN]) if name in facts else "not tried" for name in others]
        cells = [f"`{program.name}`, {program.kind}", link(program), place, *seen, str(facts["lines"])]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def link(program: Program) -> str:
    """Return the report of a program, in Markdown."""
    return f"[{program.project} {program.report.rpartition('/')[2]}]({program.report})"


def named(said: dict[str, Any]) -> str:
    """Return what a judge names in the faulty form, in Markdown."""
    if "raised" in said:
        return f"an error: `{said['raised']}`"
    if not said["found"]:
        return "nothing"
    place = f"`{said['said'].partition(': it ')[0]}`"
    return place if said["placed"] else f"{place}, another place"


def word(said: dict[str, Any]) -> str:
    """Return what a judge says of both forms, in a word."""
    if "not for it" in said:
        return "-"
    if said["found"] and said["false alarm"]:
        return "both forms"
    if said["found"]:
        return "**found**"
    return "the right form" if said["false alarm"] else "no"


def cell(said: dict[str, Any]) -> str:
    """Return what a judge says of both forms, and the seconds that it took for one."""
    return word(said) if "not for it" in said else f"{word(said)}, {said['seconds']:.1f} s"


def write(found: dict[str, dict[str, Any]]) -> None:
    """Write what is found so far."""
    known = [one for one in programs() if one.name in found]
    for one in known:
        found[one.name]["lines for"] = {name: lines_for(one, name) for name in JUDGES}
    ordered = {one.name: found[one.name] for one in known}
    facts = {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
    facts |= {f"versions-{name}": versions()[name] for name in ("python", "torch")}  # for the page
    facts |= {"figures": figures(ordered), "programs": ordered, "table": table(known, ordered)}
    FILE.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def blind_figures(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the sums over the programs of the blind test, at first and now."""
    sums = {"programs": len(found), "kinds": len({one["kind"] for one in found.values()})}
    sums["projects"] = len({one.project for one in blind_programs()})
    for when in ("first", "now"):
        said = [one[when] for one in found.values()]
        sums[f"{when}, found"] = sum(one["found"] for one in said)
        sums[f"{when}, placed"] = sum(one["placed"] for one in said)
        sums[f"{when}, false alarms"] = sum(bool(one["false alarm"]) for one in said)
        sums[f"{when}, errors"] = sum("raised" in one for one in said)
    return sums


def blind_table(tried: list[Program], found: dict[str, dict[str, Any]]) -> str:
    """Return one row for each program of the blind test, in Markdown."""
    rows = ["| program | report | at first | after mending | lines |", "|---|---|---|---|---|"]
    for program in tried:
        facts = found[program.name]
        first, now = named(facts["first"]), named(facts["now"])
        cells = [f"`{program.name}`, {program.kind}", link(program), first, "the same", str(facts["lines"])]
        if now != first:
            cells[3] = now
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def judge_blind(only: str | None) -> None:
    """Have `tp verify` judge the programs of the blind test; what it said at first stays in the file."""
    known = json.loads(BLIND_FILE.read_text(encoding="utf-8"))
    tried = blind_programs()
    with RankPool(RANKS, timeout_s=600) as pool:
        for program in tried:
            if only not in (None, program.name):
                continue
            forms = [by_verify(program, pool, right=right) for right in (False, True)]
            facts = known["programs"][program.name]
            facts |= {"kind": program.kind, "lines": program.lines(), "now": outcome(*forms)}
            print(f"{program.name}: {facts['now']}", flush=True)
    if only is None:
        known |= {"measured": date.today().isoformat(), "machine": machine(), "versions": versions()}
        known["figures"] = blind_figures(known["programs"])
        known["table"] = blind_table(tried, known["programs"])
        BLIND_FILE.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.silentbench")
    parser.add_argument("--only", metavar="NAME", help="try this program")
    parser.add_argument("--judge", choices=JUDGES, help="ask this judge")
    parser.add_argument("--blind", action="store_true", help="try the programs of the blind test")
    chosen = parser.parse_args()
    known = blind_programs() if chosen.blind else programs()
    tried = [one for one in known if chosen.only in (None, one.name)]
    if not tried:
        parser.error(f"there is no program {chosen.only!r}")
    if chosen.blind:
        judge_blind(chosen.only)
        return
    judges = [chosen.judge] if chosen.judge else list(JUDGES)
    found: dict[str, dict[str, Any]] = {}
    if chosen.judge and FILE.exists():  # what others have said stays
        found = json.loads(FILE.read_text(encoding="utf-8"))["programs"]
    with RankPool(RANKS, timeout_s=600) as pool:
        for program in tried:
            facts = found.setdefault(program.name, {})
            facts |= {"kind": program.kind, "runs": program.runs, "lines": program.lines()}
            for name in judges:
                facts[name] = trials(program, name, pool)
                print(f"{program.name}, {name}: {facts[name]}", flush=True)
            if not chosen.only:
                write(found)


if __name__ == "__main__":
    main()
