"""The pages on the devices say what happens; they run in a process of their own, which then has devices."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.simulated
@pytest.mark.parametrize("page", ["packages/tp-simulator/README.md", "docs/simulator.md"])
def test_a_page_prints_what_it_says(page):
    printed, namespace = io.StringIO(), {"__name__": "__main__"}
    expected = []
    for kind, text in FENCE.findall((ROOT / page).read_text()):
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page, "exec"), namespace)
        elif kind == "text":
            expected.append(text)
    # Streams come from a pool, in turn: others than these tests had some of them before.
    found = re.sub(r"stream (?!0)\d+", "stream 1", printed.getvalue())
    assert found == "".join(expected), found
