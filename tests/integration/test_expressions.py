"""Regular expressions of the packages: none takes long for a long text, which users give."""

import ast
import re
from pathlib import Path

import pytest

from tests.cases import first_fast

LONG = 1_000_000

USES = {"fullmatch": "fullmatch", "match": "match"}  # others look at every place of a text, as search does


def _patterns():
    """Return the regular expressions of the packages, by their places, with how each is used."""
    found = {}
    for file in sorted(Path(__file__).parents[2].glob("packages/*/src/**/*.py")):
        source = file.read_text()
        if "re." not in source:  # to parse all files takes seconds
            continue
        for node in ast.walk(ast.parse(source)):
            is_assigned = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            call = node.value if is_assigned else node
            is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if not is_call or not isinstance(call.func.value, ast.Name) or call.func.value.id != "re":
                continue
            if not isinstance(call.args[0], ast.Constant):
                continue
            uses = {call.func.attr} - {"compile"}
            if is_assigned and call.func.attr == "compile":
                uses = set(re.findall(rf"\b{node.targets[0].id}\.(\w+)\(", source))
            place = f"{file.stem}:{call.lineno}"
            pattern, known = found.get(place, (call.args[0].value, set()))
            found[place] = pattern, known | {USES.get(use, "search") for use in uses}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("char", first_fast("a-. 1"))
def test_no_expression_takes_long_for_a_long_text(char):
    # A quadratic one takes hours, and the time limit of the test ends it.
    patterns = _patterns()
    assert len(patterns) > 50
    for pattern, uses in patterns.values():
        text = char * LONG if isinstance(pattern, str) else char.encode() * LONG
        for use in uses or {"search"}:  # by a name that is passed on
            getattr(re.compile(pattern), use)(text)
