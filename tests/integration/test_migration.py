"""The lines of code in the guide for those who come from other trainers are those of its programs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
PROGRAM = re.compile(r"^### ([^\n]+)\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (.+) \| (\d+) \|$", re.MULTILINE)


def lines_of_code(source):
    lines = (line.strip() for line in source.splitlines())
    return sum(1 for line in lines if line and not re.match(r"#|import |from \S+ import ", line))


def test_the_lines_are_counted():
    text = PAGE.read_text()
    counted = {name: lines_of_code(source) for name, source in PROGRAM.findall(text)}
    assert counted == {name: int(lines) for name, lines in ROW.findall(text)}
    assert len(counted) == 7
