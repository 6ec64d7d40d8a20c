"""A Llama on real text: whole, sharded, split, and both, from one to the other, the same losses."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

SCRIPT = str(Path(__file__).parents[2] / "docs" / "examples" / "llama.py")
LAUNCH = [sys.executable, "-m", "tp_core.cli", "launch", "-n"]
WAYS = {
    "single": ([sys.executable, SCRIPT], "single"),
    "fsdp": ([*LAUNCH, "2", SCRIPT], "fsdp"),
    "shard": ([*LAUNCH, "2", SCRIPT, "--tensor", "2"], "shard"),
    "shard x fsdp": ([*LAUNCH, "4", SCRIPT, "--tensor", "2"], "shard"),
}


def start(way, folder):
    command, backend = WAYS[way]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TP_")}
    return subprocess.Popen(
        [*command, "--epochs", "2", "--steps", "12", "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ | {"OMP_NUM_THREADS": "1", "TP_BACKEND": backend},
    )


def losses(process):
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, err
    found = re.search(r"backend=(\S+) losses=(.*)", out)
    return [float(value) for value in re.split(r"[ /]", found[2])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run on one device that nobody interrupts."""
    values = losses(start("single", tmp_path_factory.mktemp("undisturbed")))
    assert values[2] < values[0] < 6  # training, first and second epoch
    return values


@pytest.mark.takes(60)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("shard", "fsdp"),
        # Written by the most ranks, in both kinds of shards; read by others.
        pytest.param("shard x fsdp", "fsdp", marks=pytest.mark.nightly),
        pytest.param("single", "shard", marks=pytest.mark.nightly),
        pytest.param("fsdp", "shard x fsdp", marks=pytest.mark.nightly),
        pytest.param("shard", "single", marks=pytest.mark.nightly),
    ],
)
def test_what_is_interrupted_in_one_way_is_finished_in_another(first, then, undisturbed, tmp_path):
    process = start(first, tmp_path)
    deadline = time.monotonic() + 800
    while process.poll() is None and not list(tmp_path.glob("checkpoints/step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=800)
    # On a busy machine the run may be at its end before the signal comes.
    assert process.returncode in (0, 143), err
    assert losses(start(then, tmp_path)) == pytest.approx(undisturbed, abs=2e-4)
    assert load_file(tmp_path / "llama.safetensors")["lm_head.weight"].shape == (256, 64)
