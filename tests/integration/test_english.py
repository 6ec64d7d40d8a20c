"""Turns of phrase that the documents do without: plain words say the same sooner."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("packages/*/README.md"),
    *ROOT.glob("packages/*/src/**/*.md"),
    *(p for p in ROOT.glob("docs/**/*.md") if not {"_build", "examples"} & set(p.parts)),
]
BANNED = {
    r"\bone's own\b|\bone's\b": "your",
    r"\bgoes on\b": "continues",
    r"\b(?:is|are) told\b": "what does it, and to what",
    r"\bso many times\b": "how many times",
    r"\bthat of\b": "a possessive, or the noun again",
    r"\bwhich is how\b": "so",
    r"\bshall\b": "must, or the imperative",
}


def turns(text):
    """Return (line, turn, better) for each banned turn."""
    return [
        (number, found[0], better)
        for number, line in enumerate(text.splitlines(), start=1)
        for turn, better in BANNED.items()
        if (found := re.search(turn, line, re.IGNORECASE))
    ]


def test_documents_have_no_banned_turn():
    found = [(str(p.relative_to(ROOT)), *turn) for p in DOCUMENTS for turn in turns(p.read_text())]
    assert found == []


def test_a_banned_turn_is_found():
    assert turns("The size is that of the job.\nIt shall be.") == [
        (1, "that of", "a possessive, or the noun again"),
        (2, "shall", "must, or the imperative"),
    ]
