"""Programs that run the code of other projects part where their reports say, and not without the fault."""

import re

import pytest

from tests.silentbench.pinned.__main__ import ROOT, judged, pinned


def test_each_record_has_a_report_and_a_program():
    for one in pinned():
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", one.report), one.name
        assert (ROOT / one.program).exists(), one.name
        assert one.faulty != one.right, one.name


@pytest.mark.nightly
@pytest.mark.takes(200)
@pytest.mark.needs("transformers", "accelerate", "peft")
@pytest.mark.parametrize("one", pinned(), ids=lambda one: one.name)
def test_the_code_of_others_parts_where_its_report_says(one):
    said = judged(one, one.faulty)["said"]
    assert re.search(one.place, said), said
    said = judged(one, one.right)["said"]
    assert not said
