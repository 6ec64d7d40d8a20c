"""The example of identities with margins, as a user would start it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

IDENTITIES = Path(__file__).parents[2] / "docs" / "examples" / "identities.py"
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        pytest.param([], [], id="alone", marks=pytest.mark.nightly),
        pytest.param(TWO_RANKS, [], id="two ranks", marks=pytest.mark.nightly),
        pytest.param(TWO_RANKS, ["--sample-rate", "0.3"], id="two ranks, sampled", marks=pytest.mark.slow),
    ],
)
def test_images_find_their_identity(launch, options):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TP_")}
    done = subprocess.run(
        [sys.executable, *launch, str(IDENTITIES), *options],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"retrieval accuracy: (\S+) before training, (\S+) after", done.stdout)
    before, after = float(found[1]), float(found[2])
    assert before < 0.8
    assert after > 0.93
