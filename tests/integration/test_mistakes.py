"""The table of mistakes: each ends in one error, which says what was given and what to do."""

import pytest
from tp_core.errors import TpError

from tests.integration.mistakes import ARGUMENTS, ATTRIBUTES, MISTAKES


@pytest.mark.filterwarnings("ignore")  # some mistakes are warned of before they are errors
def test_each_mistake_is_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(MISTAKES) - len(ARGUMENTS) - len(ATTRIBUTES) >= 150  # without names of other trainers
    for name, (call, words) in MISTAKES.items():
        with pytest.raises((TpError, AttributeError, OSError)) as caught:
            call()
        assert words in str(caught.value), name
        assert len(words) >= 25, name  # not the given value alone
    assert list(tmp_path.iterdir()) == []  # and nothing was begun
