"""The table of mistakes: each ends in one error, which says what was given and what to do."""

import pytest
from tp_core.errors import TpError

from tests.integration.mistakes import ARGUMENTS, ATTRIBUTES, EXPLAINED, MISTAKES


@pytest.mark.filterwarnings("ignore")  # some mistakes are warned of before they are errors
def test_each_mistake_is_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(MISTAKES) - len(ARGUMENTS) - len(ATTRIBUTES) >= 430  # without names of other trainers
    for name, (call, words) in MISTAKES.items():
        with pytest.raises((TpError, AttributeError, OSError)) as caught:
            call()
        assert words in str(caught.value), name
        assert len(words) >= 25, name  # not the given value alone
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


@pytest.mark.parametrize("name", EXPLAINED)
def test_an_error_of_others_has_a_note_on_its_cause(name):
    call, words = EXPLAINED[name]
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError, AssertionError)) as caught:
        call()
    assert not isinstance(caught.value, TpError)
    (note,) = [note for note in caught.value.__notes__ if words in note]
    assert len(note.splitlines()) == 1
