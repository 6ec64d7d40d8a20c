"""CI runs a test that fails once more; what failed at first is told, and what fails always fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
from pathlib import Path

def test_that_fails_once():
    been_here = Path("been_here")
    if not been_here.exists():
        been_here.touch()
        print("what it printed")
        raise OSError("the first failure")

def test_that_fails():
    raise OSError("the lasting failure")
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.nightly), "2"])
def test_a_second_try_is_told_and_a_lasting_failure_stays_one(tmp_path, workers):
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", ".", "-n", workers]
    done = subprocess.run(
        [*command, "--reruns", "1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    _, header, told = done.stdout.partition("2 FAILED AND RUN AGAIN")
    assert header, done.stdout + done.stderr
    assert done.returncode == 1
    for expected in ("test_that_fails_once", "OSError: the first failure", "what it printed"):
        assert expected in told
    assert "1 failed, 1 passed, 2 rerun" in done.stdout.splitlines()[-1]
