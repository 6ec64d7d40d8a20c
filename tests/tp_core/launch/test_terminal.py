import pytest
from tp_core.errors import ConfigError
from tp_core.internal import shows_progress


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_shown_where_somebody_watches_if_nothing_else_is_said(monkeypatch, watched):
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched, raising=False)
    assert shows_progress("auto") is watched
    assert shows_progress(True)
    assert not shows_progress(False)


def test_a_program_without_standard_error_has_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert not shows_progress("auto")


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="progress must be True, False or 'auto'"):
        shows_progress("bar")
