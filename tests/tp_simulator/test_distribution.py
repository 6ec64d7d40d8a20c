"""The source distribution, as a stranger installs it: with torch, a compiler, and nothing of ours."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[2] / "packages" / "tp-simulator"


def execute(*command, folder, **variables):
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.takes(120)
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_fresh_environment_finds_the_planted_race(tmp_path):
    execute(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, folder=PACKAGE)
    (sdist,) = tmp_path.glob("*.tar.gz")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    version = torch.__version__.partition("+")[0]
    execute(python, "-m", "pip", "install", "--quiet", f"torch=={version}", sdist, folder=tmp_path)

    readme = (PACKAGE / "README.md").read_text()
    program = tmp_path / "loop.py"
    program.write_text(re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1])
    expected = re.search(r"^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)[1]
    # No variable and no cache of ours: the extension is compiled there.
    printed = execute(
        python,
        program,
        folder=tmp_path,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        PYTHONPATH="",
        SIM_DEVICES="",
    )
    assert printed == expected
