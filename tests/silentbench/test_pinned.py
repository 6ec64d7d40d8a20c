"""Programs that run the code of other projects show what their records say, with the fault and without it."""

import json
import re

import pytest

from tests.silentbench.pinned.__main__ import FILE, ROOT, pinned, seen


def test_each_record_has_a_report_and_a_program():
    for one in pinned():
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", one.report), one.name
        assert (ROOT / one.file).exists(), one.name
        assert one.faulty != one.right, one.name
        assert bool(one.place) != bool(one.alone), one.name
        lines = (ROOT / one.file).read_text(encoding="utf-8").splitlines()
        assert one.program or sum(bool(line.strip()) for line in lines) <= 60, one.name


def test_the_table_has_what_the_records_say():
    programs = json.loads(FILE.read_text(encoding="utf-8"))["programs"]
    assert [*programs] == [one.name for one in pinned()]
    for one in pinned():
        assert one.is_as_recorded(programs[one.name]), one.name


@pytest.mark.nightly
@pytest.mark.takes(200)
@pytest.mark.needs("transformers", "accelerate", "peft", "datasets", "torchdata", "torchmetrics")
@pytest.mark.parametrize("one", pinned(), ids=lambda one: one.name)
def test_the_code_of_others_shows_what_its_record_says(one):
    facts = seen(one)
    assert one.is_as_recorded(facts), facts
