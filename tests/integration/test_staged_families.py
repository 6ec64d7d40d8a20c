"""Families of transformers that no other table has, in stages: the rows of staged_families.py."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from tp_testing import RankPool

from tests.integration import staged_families as families

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, setup=families.join) as pool:
        yield pool


@pytest.mark.takes(5)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_is_trained_as_on_one_device(ranks, name):
    result, said = families.outcome(ranks, name)
    assert result == "right", said


@pytest.mark.parametrize("name", families.REFUSED)
def test_what_a_family_is_refused_for_is_said(ranks, name):
    run = partial(
        families.train, name, "pipeline", torch.float64, families.schedule_of(name), is_remedied=False
    )
    for message in ranks.run(run):
        assert families.REFUSED[name] in message
