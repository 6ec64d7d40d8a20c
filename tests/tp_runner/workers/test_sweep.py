"""Each kind of work on each engine, in each form that a program has: a cut of ``python -m tests.sweep``."""

import sys

import pytest

from tests.sweep.__main__ import ENGINES, FORMS, available, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


def check(form, engines):
    n_checks, failed = run(form, available(engines))
    assert failed == []
    assert n_checks


@pytest.mark.takes(60)
@pytest.mark.slow
def test_each_kind_of_work_is_right_and_leaves_nothing():
    check("script", ["forkserver", "thread"])


@pytest.mark.takes(200)
@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("form", FORMS)
def test_so_it_is_on_each_engine_in_each_form(form):
    check(form, ENGINES)
