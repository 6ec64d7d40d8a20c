"""Faults that are planted in small programs, and the same programs without them."""

import pytest

from tests.tp_simulator.programs import PROGRAMS, outcome

pytestmark = pytest.mark.simulated

SIZES = (8, 33)


def test_there_are_enough_of_them():
    assert len(PROGRAMS) >= 50


def test_all_faults_are_found():
    missed = [name for name in PROGRAMS if outcome(name, wrong=True, size=8, seed=0) is None]
    assert missed == [], missed


def test_no_right_program_is_accused():
    accused = {}
    for size in SIZES:
        for name in PROGRAMS:
            found = outcome(name, wrong=False, size=size, seed=0)
            if found is not None:
                accused[name, size] = found
    assert accused == {}, accused


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_other_orders_find_most_and_accuse_nobody(seed):
    """A read by the host that comes too early is seen by what it gets: in another order it may be there."""
    accused = {}
    missed = []
    for name in PROGRAMS:
        if outcome(name, wrong=True, size=8, seed=seed) is None:
            missed.append(name)
        for size in SIZES:
            found = outcome(name, wrong=False, size=size, seed=seed)
            if found is not None:
                accused[name, size] = found
    assert accused == {}, accused
    assert len(PROGRAMS) - len(missed) >= 50, missed


def test_a_race_names_both_sides_and_the_line():
    found = outcome("the_main_stream_reads_what_a_side_stream_makes", wrong=True, size=8, seed=0)
    assert "programs.py:" in found
    assert "aten::add on stream 0 of sim:0 reads what aten::mul on stream" in found
    assert found.endswith("writes, and nothing orders them")
