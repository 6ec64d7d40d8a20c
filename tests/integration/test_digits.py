"""The main job, on one device and on one process per device, as a user would start it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "docs" / "examples" / "digits.py"
ALONE = [sys.executable, str(DIGITS)]
LAUNCHED = [sys.executable, "-m", "tp_core.cli", "launch", "-n", "2", str(DIGITS)]
TWO_DEVICES = [*ALONE, "--devices", "cpu,cpu"]


@pytest.mark.nightly
def test_the_digits_are_read_in_this_process_too(tmp_path, capsys, one_thread_per_operation):
    program = runpy.run_path(str(DIGITS))
    assert program["main"](["--devices", "cpu", "--epochs", "3", "--out", str(tmp_path)]) >= 0.95
    shown = capsys.readouterr()
    assert "backend=single device=cpu accuracy=0.9" in shown.out
    assert "epoch 3/3" in shown.err
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "digits.safetensors").stat().st_size > 10_000


@pytest.mark.takes(60)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "backend", "asked"),
    [
        pytest.param(ALONE, "single", "auto", id="alone"),
        pytest.param(LAUNCHED, "ddp", "auto", id="launched"),
        pytest.param(TWO_DEVICES, "tuple", "auto", id="two devices"),
        pytest.param(
            [*TWO_DEVICES, "--backend", "dp-gather"], "dp-gather", "asked for", id="two devices, gathered"
        ),
    ],
)
def test_the_digits_are_read_by_whichever_backend_fits(command, backend, asked, tmp_path):
    check(command, backend, asked, tmp_path, epochs=12, least=0.97)


@pytest.mark.slow
def test_the_digits_are_read_by_two_ranks(tmp_path):
    check([*LAUNCHED, "--epochs", "3"], "ddp", "auto", tmp_path, epochs=3, least=0.94)


def check(command, backend, asked, tmp_path, *, epochs, least):
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
    assert float(found[2]) >= least
    assert f"backend '{backend}' ({asked})" in done.stdout
    assert (tmp_path / "out" / "digits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "digits.safetensors").stat().st_size > 10_000
    assert f"epoch {epochs}/{epochs}" in done.stderr
