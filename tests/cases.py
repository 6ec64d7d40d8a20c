"""Cases of one promise: the first ones are fast tests, the others slow ones."""

import pytest


def first_fast(cases, count=1):
    """Return cases for ``parametrize``, with all but the first ``count`` marked slow."""
    cases = list(cases)
    others = (case if isinstance(case, tuple) else (case,) for case in cases[count:])
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]
