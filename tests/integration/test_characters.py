"""A transformer on real text: one script, each backend, interrupted and resumed, the same losses."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "docs" / "examples" / "characters.py")
ALONE = [sys.executable, SCRIPT]
LAUNCHED = [sys.executable, "-m", "tp_core.cli", "launch", "-n", "2", SCRIPT]
TWO_DEVICES = [*ALONE, "--devices", "cpu,cpu"]


def start(command, folder):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TP_")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--epochs", "2", "--steps", "36", "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def losses(process):
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, err
    found = re.search(r"backend=(\S+) losses=(.*)", out)
    return found[1], [float(value) for value in re.split(r"[ /]", found[2])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run on one device that nobody interrupts."""
    backend, values = losses(start(ALONE, tmp_path_factory.mktemp("undisturbed")))
    assert backend == "single"
    assert values[2] < values[0] < 5  # training, first and second epoch
    return values


@pytest.mark.takes(40)
@pytest.mark.parametrize(
    ("command", "backend"),
    [
        pytest.param(ALONE, "single", marks=pytest.mark.nightly, id="single"),
        pytest.param(LAUNCHED, "ddp", marks=pytest.mark.slow, id="ddp"),
        pytest.param([*LAUNCHED, "--split"], "shard", marks=pytest.mark.nightly, id="shard"),
        pytest.param(TWO_DEVICES, "tuple", marks=pytest.mark.nightly, id="tuple"),
        pytest.param(
            [*TWO_DEVICES, "--backend", "dp-gather"], "dp-gather", marks=pytest.mark.nightly, id="dp-gather"
        ),
    ],
)
def test_each_backend_comes_to_the_same_losses_though_it_was_interrupted(
    command, backend, undisturbed, tmp_path
):
    process = start(command, tmp_path)
    deadline = time.monotonic() + 800
    while process.poll() is None and not list(tmp_path.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=800)
    # On a busy machine the run may be at its end before the signal comes.
    assert process.returncode in (0, 143), err
    chosen, values = losses(start(command, tmp_path))
    assert chosen == backend
    # As the trainer shows them; a backend adds in another order.
    assert values == pytest.approx(undisturbed, abs=2e-4)
    assert load_file(tmp_path / "characters.safetensors")["head.weight"].shape[1] == 64
