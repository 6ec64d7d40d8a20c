"""The README's main example prints the same numbers on any number of ranks, as it says."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from tp_testing import run_ranks

README = Path(__file__).parents[2] / "packages" / "tp-shard" / "README.md"


def run_block(source):
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    return stream.getvalue()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_main_example_prints_the_same_on_every_rank(ranks):
    source, expected = re.search(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    ).groups()
    assert run_ranks(run_block, ranks, source) == [expected] * ranks
