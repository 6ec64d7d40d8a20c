"""The README's code prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "tp-tuple" / "README.md"


def test_every_block_of_the_readme_runs_and_prints_what_follows_it():
    blocks = re.findall(r"```(python|text)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    namespace = {"__name__": "readme"}
    printed = ""
    for kind, text in blocks:
        if kind == "python":
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile(text, str(README), "exec"), namespace)
            printed = stream.getvalue()
        else:
            assert printed == text
