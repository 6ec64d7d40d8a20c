import os
import sys
from types import SimpleNamespace

import pytest
from tp_core.errors import ConfigError
from tp_core.output import shows_progress


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_shown_where_somebody_watches_if_nothing_else_is_said(monkeypatch, watched):
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched, raising=False)
    assert shows_progress("auto") is watched
    assert shows_progress(True)
    assert not shows_progress(False)


@pytest.mark.parametrize("is_fork", [False, True])
def test_progress_is_shown_in_a_notebook_and_not_by_what_it_forks(monkeypatch, is_fork):
    session = SimpleNamespace(pid=os.getppid() if is_fork else os.getpid())
    shell = SimpleNamespace(kernel=SimpleNamespace(session=session))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert shows_progress("auto") is not is_fork


def test_a_program_without_standard_error_has_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert not shows_progress("auto")


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="progress must be True, False or 'auto'"):
        shows_progress("bar")
