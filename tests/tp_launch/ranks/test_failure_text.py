"""Which rank is called the first one, and what is shown of its log: private, as no launch orders deaths."""

from pathlib import Path

import pytest
from tp_launch._outcome import Rank, RankDeath, RankFailure, code_name, first_failure
from tp_launch._tracebacks import last_traceback

_TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
{}
"""


@pytest.fixture
def ranks(tmp_path: Path) -> dict[int, Rank]:
    made = {}
    for local in range(3):
        directory = tmp_path / str(local)
        directory.mkdir()
        made[local] = Rank(local, 10 + local, directory, directory / "out", directory / "err")
    return made


def _first(codes: dict[int, int], ranks, deaths=(), killed=()) -> RankFailure:
    return first_failure(
        {local: (100 + local, code) for local, code in codes.items()},
        ranks=ranks,
        deaths={local: RankDeath(i, None) for i, local in enumerate(deaths)},
        killed=set(killed),
        keep_logs=False,
    )


def test_the_order_of_deaths_decides(ranks):
    assert _first({0: 1, 1: 1, 2: 1}, ranks, deaths=(2, 0, 1)).rank == 12


def test_a_rank_that_only_lost_its_peer_is_not_the_first(ranks):
    ranks[0].stderr.write_text(_TRACEBACK.format("RuntimeError: Connection closed by peer"))
    ranks[1].stderr.write_text(_TRACEBACK.format("ValueError: the cause"))
    failure = _first({0: 1, 1: 1}, ranks, deaths=(0, 1))
    assert (failure.rank, failure.local_rank, failure.pid) == (11, 1, 101)
    assert failure.text.endswith("ValueError: the cause")


def test_a_rank_that_the_launcher_ended_is_not_the_first(ranks):
    assert _first({0: -15, 1: -9, 2: 1}, ranks, deaths=(0, 1, 2), killed=(1,)).rank == 12
    assert _first({0: -15}, ranks).rank == 10


@pytest.mark.parametrize("collected", [0, None], ids=["by us", "by torch"])
def test_ranks_that_had_left_well_before_the_first_failure_are_named(ranks, collected):
    ranks[0].stderr.write_text(_TRACEBACK.format("RuntimeError: Connection closed by peer"))
    deaths = {2: RankDeath(0, collected), 0: RankDeath(1, 1), 1: RankDeath(2, 0)}
    failure = first_failure({0: (100, 1)}, ranks=ranks, deaths=deaths, killed=set(), keep_logs=False)
    assert failure.exited == (12,)
    assert "rank 12 left first, with exit code 0; then rank " in str(failure)


def test_the_words_of_a_peer_inside_a_frame_are_no_consequence(ranks):
    ranks[0].stderr.write_text(
        'Traceback (most recent call last):\n  File "closed by peer.py"\nKeyError: 1\n'
    )
    assert not _first({0: 1}, ranks).is_consequence


def test_torch_marks_are_taken_off(ranks):
    ranks[0].stderr.write_text("[rank10]: Traceback (most recent call last):\n[rank10]: OSError\n")
    assert _first({0: 1}, ranks).text == "Traceback (most recent call last):\nOSError"


def test_a_traceback_that_a_killed_rank_had_survived_is_only_the_end_of_its_log(ranks):
    ranks[0].stderr.write_text(_TRACEBACK.format("ValueError: handled") + "went on\n" * 30)
    failure = _first({0: -9}, ranks)
    assert not failure.is_traceback
    assert failure.text.splitlines() == ["went on"] * 20


def test_a_chained_exception_is_shown_whole():
    chained = (
        _TRACEBACK.format("KeyError: 1")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + _TRACEBACK.format("ValueError: 2")
    )
    earlier = _TRACEBACK.format("OSError: handled") + "went on\n"
    assert last_traceback(earlier + chained) == chained.rstrip("\n")


def test_what_native_code_says_after_a_traceback_is_left_out():
    text = _TRACEBACK.format("KeyError: 1")
    assert last_traceback(text + "terminate called\nmore\n") == text.rstrip("\n")


def test_a_long_traceback_is_cut_in_the_middle(ranks):
    frames = "".join(f"  frame {i}\n" for i in range(500))
    ranks[0].stderr.write_text(f"Traceback (most recent call last):\n{frames}RecursionError: x\n")
    text = _first({0: 1}, ranks).text
    assert "... 382 lines left out ..." in text
    assert text.endswith("RecursionError: x")


def test_an_abort_at_the_end_of_a_script_has_its_remedy(ranks):
    ranks[0].stderr.write_text("terminate called without an active exception\nFatal Python error: Aborted\n")
    assert "call torch.distributed.destroy_process_group() there" in str(_first({0: -6}, ranks))


def test_a_rank_that_wrote_nothing_is_said_to_have_written_nothing(ranks):
    assert "it wrote nothing to stderr" in str(_first({0: -9}, ranks))


def test_signals_have_names():
    assert [code_name(code) for code in (3, -9, -11, -99)] == [
        "exit code 3",
        "SIGKILL",
        "SIGSEGV",
        "signal 99",
    ]
