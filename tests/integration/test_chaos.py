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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "backend", "more"),
    [(2, "fsdp", []), (4, "fsdp", []), (4, "shard", ["--tensor", "2"])],
    ids=["two", "four", "two-by-two"],
)
def test_killed_ranks_that_hold_shards_end_so_too(tmp_path, ranks, backend, more):
    run = {"epochs": 2, "seed": 5, "ranks": ranks, "timeout_s": 800, "backend": backend, "more": more}
    chaos.launch(tmp_path / "calm", kills=0, **run)
    assert chaos.launch(tmp_path / "wild", kills=1, **run) == 1
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild")


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_after_each_kill_another_number_of_ranks_goes_on(tmp_path, tensor):
    sizes = [2, 4, 1, 2]
    chaos.launch(tmp_path / "calm", kills=0, epochs=4, seed=0, ranks=1, timeout_s=800, more=["--still"])
    killed = chaos.launch_in_sizes(
        tmp_path / "wild", sizes, seed=5, timeout_s=800, backend="fsdp", tensor=tensor
    )
    assert killed == 3
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild", to_rounding=True)
