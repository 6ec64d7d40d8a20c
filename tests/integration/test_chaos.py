"""Ranks that are killed at random moments cost nothing but time: a short form of tests/chaos/run.py."""

import os

import pytest

from tests.chaos import run as chaos
from tests.chaos import stages


@pytest.mark.takes(45)
@pytest.mark.slow
def test_killed_ranks_restart_and_end_with_the_weights_of_an_undisturbed_run(tmp_path):
    chaos.launch(tmp_path / "calm", kills=0, epochs=2, seed=3, ranks=2, timeout_s=800)
    assert chaos.launch(tmp_path / "wild", kills=1, epochs=2, seed=3, ranks=2, timeout_s=800) == 1
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild")


@pytest.mark.takes(60)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "backend", "more"),
    [
        pytest.param(2, "fsdp", ["--frozen"], id="frozen"),
        pytest.param(4, "fsdp", [], id="four"),
        pytest.param(4, "shard", ["--tensor", "2"], id="two-by-two"),
        pytest.param(2, "context", ["--weights", "whole"], id="sequences"),
        pytest.param(4, "context", ["--weights", "fsdp"], id="both"),
    ],
)
def test_killed_ranks_that_hold_shards_end_so_too(tmp_path, ranks, backend, more):
    run = {"epochs": 2, "seed": 5, "ranks": ranks, "timeout_s": 800, "backend": backend, "more": more}
    chaos.launch(tmp_path / "calm", kills=0, **run)
    assert chaos.launch(tmp_path / "wild", kills=1, **run) == 1
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild")


@pytest.mark.takes(150)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "tensor", "layers", "sizes"),
    [
        ("fsdp", 1, 2, [2, 4, 1, 2]),
        ("fsdp", 2, 2, [2, 4, 1, 2]),
        ("pipeline", 1, 8, [2, 4, 1, 2]),
    ],
)
def test_after_each_kill_another_number_of_ranks_goes_on(tmp_path, backend, tensor, layers, sizes):
    more = ["--still", "--layers", str(layers)]
    chaos.launch(tmp_path / "calm", kills=0, epochs=len(sizes), seed=0, ranks=1, timeout_s=800, more=more)
    killed = chaos.launch_in_sizes(
        tmp_path / "wild", sizes, seed=5, timeout_s=800, backend=backend, tensor=tensor, layers=layers
    )
    assert killed == len(sizes) - 1
    assert chaos.same_weights(tmp_path / "calm", tmp_path / "wild", to_rounding=True)


@pytest.mark.takes(120)
@pytest.mark.nightly
@pytest.mark.parametrize("layout", stages.LAYOUTS)
def test_ended_stages_have_the_weights_and_averages_of_an_undisturbed_run(tmp_path, layout):
    layout = stages.LAYOUTS[layout]
    stages.run_calmly(tmp_path / "calm", layout, kills=3)
    killed = stages.run_wildly(tmp_path / "wild", layout, kills=3, seed=5)
    assert sum(killed.values()) == 3
    assert stages.end_alike(tmp_path / "calm", tmp_path / "wild")


def flip_a_bit(parts):
    data = bytearray(parts[1].read_bytes())
    data[len(data) // 2] ^= 1
    parts[1].write_bytes(data)


def cut_off(parts):
    os.truncate(parts[-1], parts[-1].stat().st_size - 1)


def mix_up(parts):
    for path, data in zip(parts, [path.read_bytes() for path in reversed(parts)], strict=True):
        path.write_bytes(data)


@pytest.mark.takes(150)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "backend", "more", "damage"),
    [
        pytest.param(2, "fsdp", [], flip_a_bit, id="two"),
        pytest.param(4, "fsdp", [], mix_up, id="four"),
        pytest.param(4, "shard", ["--tensor", "2"], cut_off, id="two-by-two"),
    ],
)
def test_a_part_that_was_damaged_after_the_kill_costs_the_steps_of_one_checkpoint(
    tmp_path, ranks, backend, more, damage
):
    run = {"epochs": 2, "seed": 3, "ranks": ranks, "timeout_s": 800, "backend": backend}
    chaos.launch(tmp_path / "calm", kills=0, more=more, **run)
    wild = tmp_path / "wild"
    assert chaos.launch(wild, kills=1, restarts=0, more=more, **run) == 1
    newest = max((wild / "run").glob("step-*"))
    parts = sorted((newest / "tensors").glob("*.safetensors"))
    assert len(parts) == ranks
    damage(parts)
    chaos.launch(wild, kills=1, more=[*more, "--start", "1"], **run)
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert chaos.same_weights(tmp_path / "calm", wild)
