"""The documents' code runs, and prints what they say."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_words import own_words

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "packages" / "tp-runner" / "README.md", *sorted(ROOT.glob("docs/runner/*.md"))]
BLOCKS = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def test_there_is_code_to_run():
    assert len(BLOCKS) == 10


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_the_code_prints_what_its_comments_say(capfd, place):
    code = BLOCKS[place]
    exec(code, {"__name__": "__main__"})
    printed = capfd.readouterr()
    assert not own_words(printed.err), printed.err
    out, comments = printed.out.splitlines(), re.findall(r"print\(.*\)  # (.*)", code)
    assert len(out) == len(comments), printed.out
    for line, comment in zip(out, comments, strict=True):
        said = comment.split(": ")[0]
        assert line == said or line.startswith(said.removesuffix("...)"))


@pytest.mark.slow
def test_the_command_classifies_a_folder_of_pictures(tmp_path):
    from PIL import Image

    (code,) = [block for block in BLOCKS if "class Classifier" in block]
    (command,) = re.findall(
        r"^    tp (run classify.*)$", (ROOT / "docs/runner/command.md").read_text(), re.MULTILINE
    )
    (tmp_path / "classify.py").write_text(code)
    (tmp_path / "photos").mkdir()
    colors = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}
    for name, color in colors.items():
        Image.new("RGB", (30, 20), color).save(tmp_path / "photos" / f"{name}.jpg")
    (tmp_path / "photos" / "not.jpg").write_bytes(b"no picture")
    done = subprocess.run(
        [sys.executable, "-m", "tp_core.cli", *command.split(), "--devices", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # one of them failed
    rows = {
        Path(row["source"]).stem: row
        for row in csv.DictReader((tmp_path / "classes.csv").read_text().splitlines())
    }
    assert {name: rows[name]["result"] for name in colors} == {name: name for name in colors}
    assert "cannot identify image file" in rows["not"]["error"]
