"""Ranks that are killed at random moments cost nothing but time: a short form of tests/chaos/run.py."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("chaos", Path(__file__).parents[1] / "chaos" / "run.py")
chaos = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chaos)


@pytest.mark.slow
def test_killed_ranks_restart_and_end_with_the_weights_of_an_undisturbed_run(tmp_path):
    chaos.launch(tmp_path / "calm", kills=0, epochs=3, seed=3, ranks=2, timeout_s=800)
    assert chaos.launch(tmp_path / "wild", kills=2, epochs=3, seed=3, ranks=2, timeout_s=800) == 2
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild")
