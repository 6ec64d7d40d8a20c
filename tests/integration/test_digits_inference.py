"""The digits example's model reads all scans on two workers, as a user would start it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.reference_training import train

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.slow
def test_a_trained_model_reads_all_scans_on_two_workers(tmp_path):
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the scans are so small that more threads are slower
    torch.manual_seed(0)
    model = digits.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scans, _ = digits.load_data()
    batches = torch.utils.data.DataLoader(scans, 32)
    train(model, optimizer, batches, lambda model, batch: digits.step(model, batch)["loss"])
    torch.set_num_threads(threads)
    save_file(model.state_dict(), tmp_path / "digits.safetensors")

    program = EXAMPLES / "digits_inference.py"
    done = subprocess.run(
        [sys.executable, program, "--model", tmp_path / "digits.safetensors", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("TP_")},
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("1797 scans on 2 workers, accuracy=")
    assert float(last.rpartition("=")[2]) > 0.85
    assert "1797/1797" in done.stderr
    assert (tmp_path / "digits_inference.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "digits_inference.json").read_text())["traceEvents"]
    assert sum(event["args"].get("items", 0) for event in events if "args" in event) == 1797
