"""The page of differences between layouts quotes the lines that packages log."""

import ast
import re

from tests.wheels import ROOT

PAGE = (ROOT / "docs" / "differences.md").read_text()
QUOTED = [text.strip() for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]


def logged():
    """Yield a pattern for each line that a package logs."""
    for file in (ROOT / "packages").glob("*/src/**/*.py"):
        text = file.read_text()
        if ".warning(" not in text and ".info(" not in text:  # to parse all files takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            is_log = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warning", "info")
            if is_log and node.args and isinstance(node.args[0], ast.Constant):
                pieces = re.split(r"%\.?\d*[sdgfr]", str(node.args[0].value))
                if len("".join(pieces)) > 40:
                    yield re.compile(".+".join(map(re.escape, pieces)))


def test_every_line_is_logged_as_it_is_quoted():
    patterns = list(logged())
    assert len(QUOTED) > 5
    assert [line for line in QUOTED if not any(p.fullmatch(line) for p in patterns)] == []
