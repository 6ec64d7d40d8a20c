"""What several of these tests need."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site without listings of sources, built anew, once for all workers of a run."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    out, built = place / "site", place / "site is built"
    with (place / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file unlocks it
        if not built.exists():
            shutil.rmtree(out, ignore_errors=True)  # one that failed; built upon, it would not warn
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(out)]
            environ = os.environ | {"TP_DOCS_SOURCES": "0"}
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, timeout=800, check=False
            )
            assert done.returncode == 0, done.stderr
            built.touch()
    return out
