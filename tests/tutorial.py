"""The tutorial: its pages, the programs of its steps, and the notebooks that are made of the pages.

``python -m tests.tutorial --write`` runs all steps, records what the terminals show, and writes diffs,
outputs and notebooks. Without it, what is there is compared with what it would write, and nothing is run.
"""

import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.notebooks import outputs_of

__all__ = ["PAGES", "PROGRAMS", "agree", "notebook", "record", "with_diff", "with_outputs"]

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "docs" / "examples" / "tutorial"
NAMES = ("plain", "two-ranks", "interruption", "split-model", "plugin", "report")
PAGES = tuple(ROOT / "docs" / "tutorial" / f"{name}.md" for name in NAMES)
FENCE = re.compile(r"^```(\{literalinclude\} \S+|\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# Seconds, rates and process ids are others each time; a loss or an accuracy is nearly the same.
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
MEASURED = re.compile(rf"(?<=(?:loss|racy)[= ]){NUMBER.pattern}")
HOME = "/home/you/digits"  # in place of the folder in which the steps ran


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the notebook of a page; `shown` is the console block that it comes from, if any."""

    text: str
    is_code: bool = False
    shown: str | None = None


def program(step: int) -> str:
    return (PROGRAMS / f"step{step}.py").read_text()


def with_diff(page: Path) -> str:
    """Return the page with the diff from the step before in its first diff block."""
    step = PAGES.index(page) + 1
    if step == 1:
        return page.read_text()
    before, after = (program(number).splitlines() for number in (step - 1, step))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    body = "\n".join("@@" if line.startswith("@@") else line for line in lines[1:])
    return re.sub(
        r"^```diff\n.*?^```$", lambda _: f"```diff\n{body}\n```", page.read_text(), count=1, flags=re.M | re.S
    )


def applied(diff: str, text: str) -> str:
    """Return a program with the change of one block of a solution."""
    lines = diff.splitlines()
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1, f"the program has this not once, but {text.count(old)} times:\n{old}"
    return text.replace(old, new)


def prose(text: str) -> str:
    """Return Markdown that a notebook shows: without links to pages and without directives of the site."""
    text = re.sub(r"^:::\{dropdown\} (.*)$", r"### \1", text, flags=re.M)
    text = re.sub(r"^(:::|\{download\}.*|\*\*Next:.*)$", "", text, flags=re.M)
    text = re.sub(r"^```\{image\}.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).strip()


def cells(page: Path) -> Iterator[Cell]:
    """Yield the cells of the notebook of a page."""
    step, end = PAGES.index(page) + 1, 0
    text, exercise, steps_diff = page.read_text(), program(step), step > 1
    for fence in FENCE.finditer(text):
        if before := prose(text[end : fence.start()]):
            yield Cell(before)
        end = fence.end()
        kind, body = fence.groups()
        if kind.startswith("{"):
            path = (page.parent / kind.split()[1]).resolve()
            name = path.relative_to(PROGRAMS)
            if name.parent.name:
                yield Cell(f"%mkdir -p {name.parent}", is_code=True)
            yield Cell(f"%%writefile {name}\n{path.read_text()}", is_code=True)
        elif kind == "diff":
            yield Cell(f"```diff\n{body}```")
            if steps_diff:
                yield Cell(f"%%writefile step{step}.py\n{program(step)}", is_code=True)
                steps_diff = False
            else:
                exercise = applied(body, exercise)
                following = text[end:].split("```", 2)[1]
                if following.startswith("console"):  # the last block of the solution
                    yield Cell(f"%%writefile exercise{step}.py\n{exercise}", is_code=True)
        elif kind == "console":
            commands = [line[2:] for line in body.splitlines() if line.startswith("$ ")]
            yield Cell("\n".join(["%%bash", "exec 2>&1", *commands]), is_code=True, shown=body)
    if rest := prose(text[end:]):
        yield Cell(rest)


def notebook(page: Path) -> str:
    """Return the notebook of a page, without outputs."""
    found = []
    for number, cell in enumerate(cells(page)):
        source = cell.text.rstrip("\n").splitlines(keepends=True)
        one = {"cell_type": "code" if cell.is_code else "markdown", "id": f"cell-{number}", "metadata": {}}
        if cell.is_code:
            one |= {"execution_count": None, "outputs": []}
        found.append(one | {"source": source})
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": found, "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
    )


def record(page: Path, folder: Path) -> list[str]:
    """Run the notebook of a page in a folder, and return what each console shows.

    Packages are installed into the folder, from what this environment has.
    """
    site = folder / "site-packages"
    code = {number: cell for number, cell in enumerate(cells(page)) if cell.is_code}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        for name, value in {
            "PIP_TARGET": str(site),
            "PIP_NO_BUILD_ISOLATION": "0",  # the value of pip's option: 0 is without isolation
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "88",
        }.items():
            patch.setenv(name, value)
        outputs = outputs_of({number: cell.text for number, cell in code.items()}, folder)
    found = []
    for number, each in outputs.items():
        errors = ["\n".join(one["traceback"]) for one in each if one["output_type"] == "error"]
        text = "".join(one.get("text", "") for one in each).replace(str(folder), HOME)
        assert not errors, f"{page.name}, cell {number}: {text}{errors}"
        if code[number].shown is not None:
            found.append(text)
    return found


def with_outputs(page: Path, outputs: list[str]) -> str:
    """Return the page with these outputs in its consoles, the middle of long ones left out."""
    given = iter(outputs)

    def shown(block: re.Match[str]) -> str:
        commands = [line for line in block[1].splitlines() if line.startswith("$ ")]
        lines = next(given).splitlines()
        if len(lines) > 8:
            lines = [*lines[:3], "...", *lines[-3:]]
        return "\n".join(["```console", *commands, *lines, "```"]) + "\n"

    return re.sub(r"^```console\n(.*?)^```\n", shown, page.read_text(), flags=re.M | re.S)


def agree(shown: str, found: str) -> list[str]:
    """Return the lines of a page's console that a run did not print; its losses may differ by 5 %.

    What two streams print comes in any order.
    """
    lines = found.splitlines()
    wanted = [line for line in shown.splitlines() if not line.startswith("$ ") and line != "..."]
    return [line for line in wanted if not any(_same(line, other) for other in lines)]


def _same(line: str, other: str) -> bool:
    measured = [[float(number) for number in MEASURED.findall(each)] for each in (line, other)]
    if NUMBER.sub("N", line) != NUMBER.sub("N", other):
        return False
    return all(abs(a - b) <= 0.05 * abs(a) + 0.01 for a, b in zip(*measured, strict=True))


def main() -> None:
    if "--write" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            for page in PAGES:
                page.write_text(with_diff(page))
                page.write_text(with_outputs(page, record(page, Path(folder))))
                (PROGRAMS / f"{page.stem}.ipynb").write_text(notebook(page))
    stale = [p.name for p in PAGES if p.read_text() != with_diff(p)]
    stale += [p.stem for p in PAGES if (PROGRAMS / f"{p.stem}.ipynb").read_text() != notebook(p)]
    print(
        f"to be written anew: {stale}" if stale else "diffs and notebooks are those of the programs and pages"
    )


if __name__ == "__main__":
    main()
