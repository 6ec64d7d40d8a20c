"""The scripts of the page for those who come from torchrun: what both sides of a diff print and save."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tp_testing import run_ranks

from tests.integration.test_documents import with_changes

PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"
DIFFS = re.findall(r"^```diff\n(.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def before(diff):
    """Return the script that a diff begins with."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] != "+")


def run(source, folder):
    """Run a script in a new folder, as Python does; return what it prints."""
    folder.mkdir(exist_ok=True)
    out, dtype = io.StringIO(), torch.get_default_dtype()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        try:
            exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})
        finally:
            torch.set_default_dtype(dtype)
    return out.getvalue()


def saved_in(folder):
    """Return the weights that a script has saved."""
    (path,) = folder.iterdir()
    return torch.load(path) if path.suffix == ".pt" else load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize(("diff", "printed"), DIFFS, ids=["classifier", "gpt", "gan"])
def test_a_script_has_the_numbers_of_one_process_on_two(diff, printed, tmp_path):
    torchrun, one, two = (tmp_path / name for name in ("torchrun", "one", "two"))
    assert run(with_changes(diff), one) == printed
    assert run_ranks(run, 2, with_changes(diff), two) == [printed, ""]
    torch.testing.assert_close(saved_in(two), saved_in(one), rtol=1e-6, atol=1e-8)
    # The order of the samples is another one there: the same is printed and saved, with other numbers.
    of_torchrun, nothing = run_ranks(run, 2, before(diff), torchrun)
    assert nothing == ""
    assert re.sub(r"[\d.]+", "N", of_torchrun) == re.sub(r"[\d.]+", "N", printed)
    shapes = [{name: value.shape for name, value in saved_in(folder).items()} for folder in (torchrun, one)]
    assert shapes[0] == shapes[1]
