"""Collectives of simulated devices keep NCCL's contract, and say who broke it."""

import re

import pytest
from tp_testing import RankPool, rank_outcomes, run_ranks

from tests.tp_simulator import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two():
    with RankPool(2, setup=ranks.join) as pool:
        yield pool


def test_every_collective_does_what_it_does_over_gloo_and_races_with_nothing(two):
    two.run(ranks.compare_collectives)


def test_the_host_goes_on_and_waits_where_it_is_told_how_long(two):
    for seed in (None, 0, 3):
        assert two.run(ranks.go_on_without_the_others, seed) == [0, 0]


def test_a_missing_wait_is_a_race(two):
    for races, _ in two.run(ranks.forget_to_wait):
        assert "aten::add on stream 0" in races[0]
        assert re.search(r"reads what all_reduce on stream \d+ of sim:\d writes", races[0])


def test_memory_of_a_collective_that_is_done_waits_for_no_later_one(two):
    assert two.run(ranks.free_what_a_collective_has_done) == [0, 0]


def test_tensors_that_nccl_would_not_take_are_refused(two):
    for cpu, strided, bitwise, small, itself in two.run(ranks.refusals):
        assert "cpu" in cpu
        assert "Tensors must be contiguous" in strided
        assert "NCCL has no bitwise operations" in bitwise
        assert "output tensor size must be equal to world_size times input tensor size" in small
        assert "sends nothing to itself" in itself or "Invalid" in itself


def test_ranks_that_disagree_are_told_what_each_calls():
    for message in run_ranks(ranks.call_different_things, 2):
        assert "do not call the same" in message
        assert "rank 0: all_reduce(Float[4], sum)" in message
        assert "rank 1: broadcast(Float[4], from 0)" in message
    for message in run_ranks(ranks.bring_other_shapes, 2):
        assert "rank 0: all_reduce(Float[4], sum)" in message
        assert "rank 1: all_reduce(Float[5], sum)" in message


def test_a_rank_that_waits_in_vain_is_told_the_last_calls():
    waiting, _ = rank_outcomes(ranks.stay_away, 2)
    assert "rank 0 waited for the others in call 2, broadcast(Float[4], from 0)" in waiting.value
    assert "rank 1: call 1, all_reduce(Float[4], sum)" in waiting.value
    for outcome in rank_outcomes(ranks.send_first_on_both, 2):
        assert re.search(r"rank \d: call 1, send\(Float\[4\], to \d\)", outcome.value)


def test_ranks_that_share_a_device_are_told():
    for message in run_ranks(ranks.share_a_device, 2):
        assert "Duplicate device detected: rank" in message


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipelining"])
def test_torchs_own_parallelism_trains_as_one_process_and_is_not_accused(two, name):
    for seed in (0, 1, 2):
        for reports in two.run(ranks.train_as_one, getattr(ranks, f"with_{name}"), seed):
            # FSDP2 frees gradients of its stream that the optimizer yet reads, and has that stream wait
            # before it uses the memory again: the page on collectives says so.
            accused = [text for text in reports if not (name == "fsdp" and "is freed while" in text)]
            assert accused == [], accused
