"""The pictures of the README and of the report are what their command draws."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "resumed.py"


@pytest.mark.takes(100)
@pytest.mark.nightly
def test_a_run_resumed_on_another_number_of_processes_meets_the_uninterrupted_one(tmp_path):
    out = tmp_path / "picture.png"
    command = [sys.executable, str(PICTURE), "--out", str(out)]
    report = tmp_path / "report.png"
    if has_browser := shutil.which("chromium") is not None:
        command += ["--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"largest difference (\S+)", done.stdout)[1]) < 1e-5
    assert out.read_bytes().startswith(b"\x89PNG")
    if has_browser:
        light, dark = report.read_bytes(), report.with_stem("report-dark").read_bytes()
        assert light.startswith(b"\x89PNG")
        assert dark.startswith(b"\x89PNG")
        assert light != dark
