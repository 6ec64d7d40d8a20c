"""Every Python block in a document runs, and prints what the document says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    # In tests/tp_runner the code of its pages is compared with its comments. Those of tp-simulator change
    # torch for the rest of a process: tests/tp_simulator runs them in one of its own.
    *sorted(
        p for p in ROOT.glob("packages/*/README.md") if p.parent.name not in {"tp-runner", "tp-simulator"}
    ),
    # Examples of plugins have libraries of their own, and tests of their own. So have the tutorial
    # and the page for those who come from torchrun.
    *sorted(
        p
        for p in ROOT.glob("docs/**/*.md")
        if not {"_build", "examples", "runner", "tutorial", "simulator", "simulator.md", "torchrun.md"}
        & set(p.parts)
    ),
]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path):
    """Yield (first line, source, expected output or None) of each Python block."""
    text = path.read_text()
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None], strict=False):
        if fence[1] in ("python", "diff"):
            line = text[: fence.start()].count("\n") + 2
            adjacent = after is not None and not text[fence.end() : after.start()].strip()
            source = fence[2] if fence[1] == "python" else with_changes(fence[2])
            yield line, source, after[2] if adjacent and after[1] == "text" else None


def with_changes(diff):
    """Return what a diff makes of a program, with a line for each of its lines."""
    return "".join("\n" if line[0] == "-" else line[1:] or "\n" for line in diff.splitlines(keepends=True))


def squeezed(text):
    """Drop what differs from machine to machine: times, rates and the width of columns."""
    text = re.sub(r"[\d,]+ samples/s", "N samples/s", text)
    return re.sub(r"[ \t]+", " ", text).strip()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            p,
            id=str(p.relative_to(ROOT)),
            marks=pytest.mark.slow if "docs" in p.relative_to(ROOT).parts else (),
        )
        for p in DOCUMENTS
    ],
)
def test_the_blocks_of_a_document_run_and_print_what_it_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, source, expected in blocks(path):
        out = io.StringIO()
        code = compile("\n" * (line - 1) + source, str(path), "exec")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            exec(code, namespace)
        if expected is not None:
            assert squeezed(out.getvalue()) == squeezed(expected), f"{path.name}, line {line}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("packages/*/README.md")), ids=lambda p: p.parent.name)
def test_the_page_of_a_package_can_be_read_alone(path):
    text, name = path.read_text(), path.parent.name
    assert text.startswith(f"# {name}\n")
    assert f"    pip install {name}" in text[:600]
    assert re.search(
        rf"In a checkout this is `pip install (\./packages/tp-\S+ )*\./packages/{name}`\.", text[:1500]
    )
    assert "\n```python\n" in text
    assert re.findall(r"^## (Limits|More)$", text, re.MULTILINE) == ["Limits", "More"]
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == [], (
        "an index shows no other file of this repository"
    )


def test_no_page_begins_with_an_index_that_has_no_tp():
    for path in DOCUMENTS:
        text = path.read_text()
        commands = re.findall(
            r"^\$? ?pip install tp-.*", "\n".join(f[2] for f in FENCE.finditer(text)), re.MULTILINE
        )
        assert commands == [], path
        if re.search(r"pip install .*\./packages/", text):
            assert re.search(r"is on no package index yet|[Ii]n a checkout", text), path


def test_there_are_blocks_to_run():
    assert any(list(blocks(path)) for path in DOCUMENTS)
