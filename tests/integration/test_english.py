"""Turns of phrase that documents, docstrings and messages do without: plain words say the same sooner."""

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
    r"\b(?:goes|go) on\b": "continues",
    r"\banew\b": "again",
    r"\bas ever\b": "as usual",
    r"\b(?:is|are) those of\b": "equal, come from, or the noun again",
    r"\b(?:is|are) told\b": "what does it, and to what",
    r"\bso many times\b": "how many times",
    r"\bthat of\b": "a possessive, or the noun again",
    r"\btold\b|\bwhose\b": "'with', or a sentence of its own",
    r"\bwhich is how\b": "so",
    r"\bshall\b": "must, or the imperative",
}

SOURCES = [*ROOT.glob("packages/*/src/**/*.py")]
GUIDES = [
    *ROOT.glob("docs/*.md"),
    *(
        p
        for folder in ("trainer", "resuming", "fsdp", "plugins", "runner", "context", "tutorial")
        for p in ROOT.glob(f"docs/{folder}/*.md")
    ),
]
WORDS = 900
SENTENCE = 40  # words; most have less than half
LOOKED_UP = {  # tables and programs that nobody reads from top to bottom
    "benchmarks.md",
    "commands.md",
    "migration.md",
    "migration-jobs.md",
    "migration-names.md",
    "plugin-tests.md",
    "runner-peers.md",
}


def turns(text):
    """Return (line, turn, better) for each banned turn that is not in a program or what one prints."""
    if not re.search("|".join(BANNED), text, re.IGNORECASE):
        return []
    text = re.sub(r"^```(?!\{).*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return [
        (number, found[0], better)
        for number, line in enumerate(text.splitlines(), start=1)
        for turn, better in BANNED.items()
        if (found := re.search(turn, line, re.IGNORECASE))
    ]


def long_sentences(text):
    """Return the sentences of a text that have too many words, without those of tables and programs."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *\|.*$", "", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?= *[-*\d] )|\n(?=#)", text)
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?:;])\s", " ".join(p.split()))]
    return [sentence for sentence in sentences if len(sentence.split()) > SENTENCE]


def test_no_sentence_of_the_documents_is_endless():
    found = {str(p.relative_to(ROOT)): long_sentences(p.read_text()) for p in DOCUMENTS}
    assert {page: long for page, long in found.items() if long} == {}


def test_documents_docstrings_and_messages_have_no_banned_turn():
    texts = [*DOCUMENTS, *SOURCES]
    found = [(str(p.relative_to(ROOT)), *turn) for p in texts for turn in turns(p.read_text())]
    assert found == []


def test_a_banned_turn_is_found():
    assert turns("The size is that of the job.\nIt shall be.") == [
        (1, "that of", "a possessive, or the noun again"),
        (2, "shall", "must, or the imperative"),
    ]


def test_a_guide_is_one_task():
    words = {str(p.relative_to(ROOT)): len(p.read_text().split()) for p in GUIDES if p.name not in LOOKED_UP}
    assert {page: count for page, count in words.items() if count > WORDS} == {}
