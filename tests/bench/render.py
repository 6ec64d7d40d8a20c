"""Put the figures into the documents that quote them, and draw the plots: python -m tests.bench.render

The first line of a template, ``docs/benchmarks/*.md.in``, names the document that it becomes, or the
section of one: ``<!-- README.md: ## Figures -->``. In it ``{{NAME | FIGURE | FORMAT}}`` is a figure of
``docs/benchmarks/NAME.json``, in one of Python's formats, and ``{{NAME | FIELD}}`` is a field of that
file, such as when it was measured. A format may begin with a factor: ``1e-3* .0f``.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.bench import plots
from tests.bench._results import FOLDER

__all__ = ["documents", "render"]

ROOT = FOLDER.parents[1]
HEAD = re.compile(r"<!-- (\S+?)(?:: (## .+?))? -->\n")
PLACE = re.compile(r"\{\{(.+?)\}\}")


def render(template: str, folder: Path = FOLDER) -> str:
    """Return the text of a template with its figures in place.

    Raises:
        KeyError: A file has no such figure; the message names both.
    """

    @cache
    def measured(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return found

    def value(place: re.Match[str]) -> str:
        name, *words = (word.strip() for word in place[1].split("|"))
        if len(words) == 1:
            return str(measured(name)[words[0]])
        figure, form = words
        if figure not in measured(name)["figures"]:
            msg = f"{name}.json has no figure {figure!r}"
            raise KeyError(msg)
        factor, _, form = form.rpartition("*")
        return format(measured(name)["figures"][figure] * float(factor or 1), form.strip())

    return PLACE.sub(value, template)


def documents(folder: Path = FOLDER, root: Path = ROOT) -> dict[Path, str]:
    """Return the text of each document that quotes figures, by its path.

    Raises:
        ValueError: A template's first line names no document, or a section that it lacks.
    """
    found: dict[Path, str] = {}
    for template in sorted(folder.glob("*.md.in")):
        source = template.read_text(encoding="utf-8")
        head = HEAD.match(source)
        if head is None:
            msg = f"{template} has to begin with the name of its document: <!-- docs/page.md -->"
            raise ValueError(msg)
        path, heading = root / head[1], head[2]
        text = render(source[head.end() :], folder)
        if heading is not None:
            text = _with_section(found.get(path) or path.read_text(encoding="utf-8"), heading, text)
        found[path] = text
    return found


def _with_section(document: str, heading: str, text: str) -> str:
    """Return the document with the section of that heading replaced."""
    section = re.compile(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if not section.search(document):
        msg = f"the document has no section {heading!r}"
        raise ValueError(msg)
    return section.sub(lambda _: text, document, count=1)


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)
    for path in plots.draw(FOLDER / "plots"):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
