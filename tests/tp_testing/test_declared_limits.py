"""What a backend does not do is declared by name and reason, and nothing else is left out."""

import contextlib
import io
from textwrap import dedent

import pytest
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Session, Verdict
from tp_testing import BackendConformance

SUITE = """
    from tp_core.plugins import Backend, Session, Verdict
    from tp_testing import ConformanceKit

    class Mine(Backend):
        name = "mine"
        def assess(self, job):
            return Verdict.fits(1, "mine")
        def open(self, job):
            return Session(job)

    class Kit(ConformanceKit):
        def test_fails(self):
            assert False
        def test_passes(self):
            pass

    class TestMine(Kit):
        backend = Mine
        limits = {limits}
"""


class Mine(Backend):
    name = "mine"

    def assess(self, job):
        return Verdict.fits(1, "mine")

    def open(self, job):
        return Session(job)


def test_a_limit_that_names_no_test_is_refused():
    with pytest.raises(ConfigError, match="a limit of 'test_no_such', which is none of its tests"):

        class TestMine(BackendConformance):
            backend = Mine
            limits = {"test_no_such": "it is not there"}


def test_a_limit_without_a_reason_is_refused():
    with pytest.raises(ConfigError, match="needs a reason"):

        class TestMine(BackendConformance):
            backend = Mine
            limits = {"test_closing_twice_does_nothing": ""}


def test_a_declared_limit_is_shown_with_its_reason(tmp_path):
    result = report(tmp_path, {"test_fails": "it is too hard"})
    assert "1 passed, 1 xfailed" in result
    assert "declared limit of 'mine': it is too hard" in result


@pytest.mark.slow
def test_a_declared_limit_that_is_none_is_an_error(tmp_path):
    result = report(tmp_path, {"test_passes": "it is too hard"})
    assert "2 failed" in result
    assert "XPASS(strict)" in result


def report(folder, limits):
    """Run a suite beside this one and return what pytest says of it."""
    # Under a name of its own: what is imported under another one's would not be read.
    (folder / f"{folder.name}.py").write_text(dedent(SUITE).replace("{limits}", repr(limits)))
    without = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "timeout", "xdist")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        pytest.main(["-ra", "-q", "--import-mode=importlib", *without, f"--rootdir={folder}", str(folder)])
    return out.getvalue()
