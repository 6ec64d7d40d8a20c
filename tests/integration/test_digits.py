"""The main job, on one device and on one process per device, as a user would start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "docs" / "examples" / "digits.py"
ALONE = [sys.executable, str(DIGITS)]
LAUNCHED = [sys.executable, "-m", "tp_core.cli", "launch", "-n", "2", str(DIGITS)]
TWO_DEVICES = [*ALONE, "--devices", "cpu,cpu"]


@pytest.mark.parametrize(
    ("command", "backend", "asked"),
    [
        pytest.param(ALONE, "single", "auto", id="alone"),
        pytest.param(LAUNCHED, "ddp", "auto", marks=pytest.mark.slow, id="launched"),
        pytest.param(TWO_DEVICES, "tuple", "auto", marks=pytest.mark.slow, id="two devices"),
        pytest.param(
            [*TWO_DEVICES, "--backend", "dp-gather"],
            "dp-gather",
            "asked for",
            marks=pytest.mark.slow,
            id="two devices, gathered",
        ),
    ],
)
def test_the_digits_are_read_by_whichever_backend_fits(command, backend, asked, tmp_path):
    # Beside other tests, threads of one program that wait for each other would starve.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TP_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.search(r"backend=(\S+) device=cpu accuracy=(\S+)$", last)
    assert found, last
    assert found[1] == backend
    assert float(found[2]) >= 0.97
    assert f"backend '{backend}' ({asked})" in done.stdout
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "digits.pt").stat().st_size > 10_000
    assert "epoch 12/12" in done.stderr
