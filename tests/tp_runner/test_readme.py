"""The documents' code runs, and prints what they say."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "tp-runner" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_is_code_to_run():
    assert len(BLOCKS) == 7


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_the_code_prints_what_its_comments_say(run_script, code):
    out = run_script(code).splitlines()
    comments = re.findall(r"print\(.*\)  # (.*)", code)
    assert len(out) == len(comments)
    for line, comment in zip(out, comments, strict=True):
        said = comment.split(": ")[0]
        assert line == said or line.startswith(said.removesuffix("...)"))
