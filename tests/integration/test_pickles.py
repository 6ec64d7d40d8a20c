"""The places that read pickles stand in SECURITY.md, and nowhere else is one read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
READS = re.compile(r"pickle\.loads?\(|Unpickler|weights_only=False|cloudpickle\.loads?\(")


def test_every_place_that_unpickles_is_named():
    table = (ROOT / "SECURITY.md").read_text().partition("## Where pickles are read")[2]
    named = set(re.findall(r"^\| `(tp_\w+)", table, re.MULTILINE))
    found = {
        file.relative_to(ROOT / "packages").parts[2]
        for file in ROOT.glob("packages/*/src/**/*.py")
        if READS.search(file.read_text())
    }
    assert found == named
    for variable in ("TP_VERIFY`", "TP_VERIFY_IMPORTS`"):
        assert variable in table
