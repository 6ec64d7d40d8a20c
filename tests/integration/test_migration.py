"""Programs of the pages for those who come from elsewhere run, and their lines of code are counted."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROGRAMS = re.compile(r"^```py\n# ([^\n]+)\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "jobs.md"
PROGRAM = re.compile(r"^### ([^\n]+)\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ([^|]+) \| (\d+) \|$", re.MULTILINE)


def lines_of_code(source):
    lines = (line.strip() for line in source.splitlines())
    return sum(1 for line in lines if line and not re.match(r"#|import |from \S+ import ", line))


def test_the_lines_are_counted():
    text = PAGE.read_text()
    counted = {name: lines_of_code(source) for name, source in PROGRAM.findall(text)}
    assert counted == {name: int(lines) for name, lines in ROW.findall(text)}
    assert len(counted) == 7


def needs_of(source):
    return pytest.mark.needs(*sorted(set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))))


def others():
    """Yield each program of another library on the page, below what both programs of its job share."""
    text = PAGE.read_text()
    (shared,) = re.findall(r"^```python\n(.*?)^```\n\n### tp, `fit`", text, re.MULTILINE | re.DOTALL)
    for number, source in enumerate(re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL), 1):
        yield pytest.param(shared + source, marks=needs_of(shared + source), id=f"{PAGE.stem} {number}")


@pytest.mark.nightly  # they change with the releases of others alone
@pytest.mark.parametrize("source", list(others()))
def test_a_program_of_another_library_runs_and_goes_on_with_what_it_has_saved(source, tmp_path):
    (tmp_path / "script.py").write_text(source)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "script.py"]


def programs():
    """Yield each program of the pages that move: its command, its source, and what it prints."""
    for page in (DOCS / "migration.md", DOCS / "runner" / "pools.md"):
        for number, found in enumerate(PROGRAMS.findall(page.read_text()), 1):
            yield pytest.param(*found, marks=needs_of(found[1]), id=f"{page.stem} {number}")


@pytest.mark.slow
@pytest.mark.parametrize(("command", "source", "printed"), list(programs()))
def test_a_program_prints_what_the_page_says(command, source, printed, tmp_path):
    (tmp_path / "script.py").write_text(source)
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]
    environ = os.environ | {"PATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(printed.splitlines())
