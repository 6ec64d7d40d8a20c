"""A whole step of models of many families is that of one device on many ranks, all in this process."""

import json
from pathlib import Path

import pytest

from tests.tp_shard.verify.families import FAMILIES, report_of

PAGE = Path(__file__).parents[3] / "docs/benchmarks/shard-many-ranks.json"
FEW = [("BERT", 8), ("Mixtral", 8), ("Llama", 7)]


def test_each_row_of_the_page_is_equal_in_less_than_a_minute():
    rows = json.loads(PAGE.read_text(encoding="utf-8"))["rows"]
    assert {name.removesuffix(", 64") for name in rows if name.endswith(", 64")} == FAMILIES.keys()
    for name, row in rows.items():
        assert row["ok"], name
        assert row["seconds"] < 60, name


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize(("family", "ranks"), FEW)
def test_a_step_on_pretended_ranks_is_that_of_one_device(family, ranks):
    report_of(family, ranks).assert_ok()


@pytest.mark.nightly
@pytest.mark.needs("transformers")
@pytest.mark.takes(120)
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_many_pretended_ranks_is_that_of_one_device(family, ranks):
    report_of(family, ranks).assert_ok()
