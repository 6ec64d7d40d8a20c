"""Cases of one promise: the first ones are fast tests, the others slow ones."""

import pytest


def first_fast(cases, count=1):
    """Return cases for ``parametrize``, with all but the first ``count`` marked slow."""
    cases = list(cases)
    return [*cases[:count], *map(_slow, cases[count:])]


def _slow(case):
    if hasattr(case, "marks"):  # it is a pytest.param already
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
