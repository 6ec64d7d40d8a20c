"""The example of a growing classifier, as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLASSIFIER = Path(__file__).parents[2] / "docs" / "examples" / "classifier.py"


@pytest.mark.takes(40)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_classifier_grows(ranks, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TP_")}
    done = subprocess.run(
        [
            sys.executable,
            *launch,
            str(CLASSIFIER),
            "--classes",
            "1000",
            "100003",
            "--out",
            str(tmp_path / "growth.png"),
        ],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert [row[0] for row in rows] == ["1,000", "100,003"]
    if ranks == 2:
        split, whole = float(rows[1][1]), float(rows[1][2])
        assert split < 0.8 * whole
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
