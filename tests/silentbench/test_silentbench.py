"""The bench is what it says: small programs with records, and wrong numbers in their faulty forms alone."""

import json
import re

import pytest
from tp_core.ranks import RankPool

from tests.silentbench.__main__ import BLIND_FILE, FILE, OWN, TYPES, blind_figures, outcome, word
from tests.silentbench._judges import by_counts, by_logs, by_types, by_verify
from tests.silentbench._programs import FOLDER, RANKS, blind_programs, programs
from tests.silentbench._runs import (
    apart,
    curve_of_one_device,
    curve_of_ranks,
    losses_of_seeds,
    masks_of_ranks,
    numbers_of_ranks,
)
from tests.silentbench.pinned.__main__ import pinned

PROGRAMS = programs()
BLIND = blind_programs()
KINDS = {
    *("reductions", "means", "scales", "clipping", "RNG", "dropout", "masks", "positions", "buffers", "ties"),
    *("states at save and load", "order of data", "schedules", "precision", "routing", "aux losses"),
    *("accumulation", "frozen and late parameters", "shapes that do not divide", "second use of a module"),
}
FEW = PROGRAMS[::10]
# One device draws other masks than ranks. Whether ranks draw the same in the right form:
DROPOUT = {"rows_share_masks": False, "slices_share_masks": False, "tensor_ranks_differ": True}
RESUMED = {"rng_of_first_rank", "adapters_of_first_rank", "optimizer_of_first_rank"}
RESUMED |= {"states_by_place", "steps_not_saved"}
RECOMPUTED = {"recomputed_masks"}
DROPPED = {"attention_dropout_lost"}


def named(names):
    return pytest.mark.parametrize(
        "program", [one for one in PROGRAMS if one.name in names], ids=lambda one: one.name
    )


@pytest.fixture(scope="module")
def ranks():
    with RankPool(RANKS, timeout_s=800) as pool:
        yield pool


@pytest.mark.parametrize("tried", [PROGRAMS, BLIND], ids=["programs", "blind"])
def test_each_program_has_a_record_of_a_known_kind(tried):
    assert set((FOLDER / tried[0].folder).glob("*.py")) == {one.file for one in tried}
    assert {one.kind for one in tried} == KINDS
    for one in tried:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", one.report), one.name
        assert one.runs in ("re-made", "torch"), one.name
        assert one.lines() <= 60, one.name
        assert re.fullmatch(r'"""[^"]+\."""', one.file.read_text(encoding="utf-8").splitlines()[0]), one.name


@pytest.mark.slow
@pytest.mark.parametrize("program", FEW, ids=lambda one: one.name)
def test_a_fault_is_found_at_its_place_and_the_right_form_is_equal(program, ranks):
    faulty = by_verify(program, ranks, right=False)
    assert faulty.is_placed, faulty.said
    assert not by_verify(program, ranks, right=True).found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.name)
def test_no_right_form_is_accused(program, kind, ranks):
    right = by_verify(program, ranks, right=True, dtype=TYPES[kind])
    assert not right.found, right.said


@pytest.mark.nightly
@named({one.name for one in PROGRAMS} - DROPOUT.keys() - RESUMED - RECOMPUTED - DROPPED)
def test_the_faulty_form_alone_trains_what_one_device_does_not(program, ranks):
    one = curve_of_one_device(program, steps=20)
    assert apart(one, curve_of_ranks(program, ranks, right=True, steps=20)) < 1e-7
    assert apart(one, curve_of_ranks(program, ranks, right=False, steps=20)) > 1e-6


def test_a_blind_program_is_of_a_report_that_no_other_has():
    for key in ("report", "name"):
        known = [getattr(one, key) for one in (*PROGRAMS, *pinned())]
        blind = {getattr(one, key) for one in BLIND}
        assert len(blind) == len(BLIND)
        assert not blind & set(known)


@pytest.mark.slow
@pytest.mark.parametrize("program", BLIND, ids=lambda one: one.name)
def test_a_fault_of_a_blind_program_is_in_its_faulty_form_alone(program, ranks):
    if program.name == "heads_share_masks":  # one device draws other masks than ranks
        for right in (True, False):
            one, other = masks_of_ranks(program, ranks, right=right, name="of_heads")
            assert (one == other) != right
        return
    resumed = "reload_on" in program.case(right=True)
    one = curve_of_one_device(program, steps=6)
    assert apart(one, curve_of_ranks(program, ranks, right=True, steps=6, resumed=resumed)) < 1e-7
    assert apart(one, curve_of_ranks(program, ranks, right=False, steps=6, resumed=resumed)) > 1e-6


def test_what_was_found_at_first_in_the_blind_test_stays_as_it_was():
    known = json.loads(BLIND_FILE.read_text(encoding="utf-8"))
    assert [*known["programs"]] == [one.name for one in BLIND]
    assert known["figures"] == blind_figures(known["programs"])
    first = {key: known["figures"][f"first, {key}"] for key in ("found", "placed", "false alarms", "errors")}
    assert first == {"found": 22, "placed": 20, "false alarms": 0, "errors": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("program", BLIND, ids=lambda one: one.name)
def test_the_table_of_the_blind_test_says_what_is_found_now(program, ranks):
    known = json.loads(BLIND_FILE.read_text(encoding="utf-8"))["programs"][program.name]["now"]
    faulty = by_verify(program, ranks, right=False)
    assert (faulty.found, faulty.is_placed) == (known["found"], known["placed"]), faulty.said
    right = by_verify(program, ranks, right=True)
    assert not right.found, right.said


@pytest.mark.nightly
@named(RESUMED)
def test_the_faulty_form_alone_resumes_otherwise(program, ranks):
    whole = curve_of_ranks(program, ranks, right=True, steps=20)
    for right in (True, False):
        resumed = curve_of_ranks(program, ranks, right=right, steps=20, resumed=True)
        assert (apart(whole, resumed) == 0) == right


@pytest.mark.nightly
@named(DROPOUT)
def test_ranks_draw_as_one_device_in_the_right_form_alone(program, ranks):
    for right in (True, False):
        one, other = numbers_of_ranks(program, ranks, right=right)
        assert (one == other) == (DROPOUT[program.name] == right)


@pytest.mark.nightly
@named(DROPPED)
def test_the_faulty_form_alone_drops_nothing(program, ranks):
    for right in (True, False):
        one, other = losses_of_seeds(program, ranks, right=right)
        assert (one == other) != right


def test_most_faults_are_found_and_named_and_no_right_form_accused():
    sums = json.loads(FILE.read_text(encoding="utf-8"))["figures"]
    assert sums["tp verify, false alarms"] == 0
    for kind in TYPES:
        assert sums[f"tp verify, {kind}, found"] >= 90, kind
        assert sums[f"tp verify, {kind}, placed"] >= 80, kind


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.name)
def test_the_table_says_what_is_found(program, ranks):
    known = recorded("tp verify", program)
    faulty = by_verify(program, ranks, right=False)
    assert (faulty.found, faulty.is_placed) == (known["found"], known["placed"]), faulty.said


def said_of(judge, program, ranks):
    return outcome(judge(program, ranks, right=False), judge(program, ranks, right=True))


def recorded(name, program):
    return json.loads(FILE.read_text(encoding="utf-8"))["programs"][program.name][name][OWN]


@pytest.mark.nightly
@pytest.mark.needs("spmd_types")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.name)
def test_types_refuse_what_the_table_says(program, ranks):
    assert word(said_of(by_types, program, ranks)) == word(recorded("spmd-types", program))


@pytest.mark.nightly
@pytest.mark.parametrize("program", FEW, ids=lambda one: one.name)
def test_logs_of_operations_say_what_the_table_says(program, ranks):
    assert word(said_of(by_logs, program, ranks)) == word(recorded("DebugMode", program))


@pytest.mark.nightly
@pytest.mark.parametrize("program", FEW, ids=lambda one: one.name)
def test_counts_of_collectives_say_what_the_table_says(program, ranks):
    assert word(said_of(by_counts, program, ranks)) == word(recorded("CommDebugMode", program))


@pytest.mark.nightly
@named(RECOMPUTED)
def test_masks_that_are_drawn_again_give_other_gradients(program, ranks):
    curves = [curve_of_ranks(program, ranks, right=right, steps=20) for right in (True, False)]
    assert apart(*curves) > 1e-3
