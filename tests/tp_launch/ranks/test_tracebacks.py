"""An error that several ranks have is shown once: private, as launches have no order of lines."""

import io

import pytest
from tp_launch._rank_logs import LogTail
from tp_launch._tracebacks import RankErrors

HEAD = "Traceback (most recent call last):"


def traceback(exception, *, line=3, notes=""):
    return f'{HEAD}\n  File "/home/me/train.py", line {line}, in step\n    check(batch)\n{exception}\n{notes}'


def shown(tmp_path, *texts, errors=None):
    """Return what a launch shows of the stderr of ranks that have written these."""
    out = io.StringIO()
    tail = LogTail()
    errors = errors or RankErrors()
    for rank, text in enumerate(texts):
        path = tmp_path / str(rank)
        path.write_text(text)
        tail.follow(path, prefix=f"[rank{rank}] ", out=out, drop=f"[rank{rank}]: ", rank=rank, errors=errors)
        tail.drain()  # in this order
    tail.start()
    tail.stop()
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("ranks", "names"), [(2, "0 and 1"), (3, "0, 1 and 2")])
def test_an_error_of_all_ranks_is_shown_once_and_the_ranks_are_named(tmp_path, ranks, names):
    text = traceback("ValueError: bad data", notes="a note\n")
    lines = shown(tmp_path, *[text] * ranks)
    assert lines[:5] == [f"[rank0] {line}" for line in text.splitlines()]
    notes = [line for line in lines if line.startswith("tp launch")]
    assert set(lines[5:]) == set(notes)
    assert "the same error, which [rank0] shows above" in notes[0]
    assert all(number in "".join(notes) for number in names if number.isdigit())
    assert "[rank1]" not in "\n".join(lines)


def test_ranks_that_fail_together_have_one_note_with_what_they_say_themselves(tmp_path):
    errors = RankErrors()
    lines = [errors.shorten(rank, traceback(f"ValueError: row {rank}").splitlines()) for rank in range(7)]
    assert len(lines[0]) == 4
    assert lines[1:] == [[]] * 6
    assert errors.take_notes(last=False) == []  # more ranks may come
    assert errors.take_notes(last=True) == [
        "tp launch: ranks 0, 1, 2, 3, 4, 5 and 6: the same error, which [rank0] shows above",
        *[f"  rank {rank}: ValueError: row {rank}" for rank in range(1, 5)],
        "  and 2 more",
    ]
    assert errors.take_notes(last=True) == []
    assert {errors.shown_by(rank) for rank in range(7)} == {0}


@pytest.mark.parametrize(
    "other",
    [
        traceback("KeyError: 1"),
        traceback("ValueError: bad", line=4),
        "before\n" + traceback("ConnectionRefusedError: [Errno 111] Connection refused"),
        f"{HEAD}\n  File cut off",
    ],
    ids=["type", "line", "own connection", "cut"],
)
def test_another_error_is_shown_too(tmp_path, other):
    lines = shown(tmp_path, traceback("ValueError: bad"), other)
    assert [line for line in lines if "[rank1]" in line] == [f"[rank1] {line}" for line in other.splitlines()]
    assert "same error" not in "\n".join(lines)


def test_what_a_rank_writes_after_the_same_error_is_shown(tmp_path):
    text = traceback("ValueError: bad", notes="a note\n")
    lines = shown(tmp_path, text, f"{text}epoch 2\n")
    assert "[rank1] epoch 2" in lines
    assert "[rank1] a note" not in lines


def test_an_error_that_one_rank_has_twice_is_shown_twice(tmp_path):
    text = traceback("ValueError: bad")
    assert "\n".join(shown(tmp_path, text + "epoch 2\n" + text)).count(HEAD) == 2


def test_a_chain_of_exceptions_is_one_error(tmp_path):
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    text = traceback("KeyError: 1") + chain + traceback("ValueError: bad")
    lines = shown(tmp_path, text, text)
    assert "\n".join(lines).count(HEAD) == 2
    assert lines[-1].startswith("tp launch: ranks 0 and 1: the same error")


def test_a_rank_that_lost_another_one_has_a_line(tmp_path):
    torch = '  File "/x/site-packages/torch/distributed/c10d.py", line 99, in barrier\n    work.wait()\n'
    lost = traceback(f"{torch}RuntimeError: Connection closed by peer")
    errors = RankErrors()
    assert shown(tmp_path, lost, traceback("ValueError: bad"), errors=errors)[0] == (
        "[rank0] lost another rank at line 3 of train.py, and ends: RuntimeError: Connection closed by peer"
    )
    assert errors.shown_by(0) is None
    assert errors.shown_by(1) == 1


def test_an_error_of_its_own_is_shown_though_another_rank_was_lost_after_it(tmp_path):
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    text = traceback("ValueError: bad") + chain + traceback("RuntimeError: Connection closed by peer")
    assert len(shown(tmp_path, text)) == len(text.splitlines())


def test_ranks_that_timed_out_keep_their_frames(tmp_path):
    late = traceback("RuntimeError: Timed out waiting 1800000ms for recv operation to complete")
    assert len(shown(tmp_path, late)) == 4
