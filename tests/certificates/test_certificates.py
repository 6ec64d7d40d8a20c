"""What the page of resume certificates says of today's libraries is so."""

import json

import pytest

from tests.certificates import __main__ as command
from tests.certificates.__main__ import FILE, PROGRAMS, certified, rows

MODULES = {"tp-trainer": "tp_trainer"}


def test_each_row_has_its_program_and_its_outcome_on_the_page():
    found = json.loads(FILE.read_text(encoding="utf-8"))
    assert list(found["rows"]) == [f"{row.stack}, {row.how}" for row in rows()]
    assert {row.program for row in rows()} == {path.name for path in PROGRAMS.glob("*.py")}


def test_a_row_that_is_tried_again_takes_its_place_in_the_file(tmp_path, monkeypatch):
    before = json.loads(FILE.read_text(encoding="utf-8"))
    (tmp_path / "certificates.json").write_text(json.dumps(before), encoding="utf-8")
    monkeypatch.setattr(command, "FILE", tmp_path / "certificates.json")
    monkeypatch.setattr(command.metadata, "version", lambda _: "1.0")  # of libraries that may not be here
    report = {"ok": False, "findings": []}
    command.write("torch, 1 rank", {"ok": False, "text": "no", "reports": [report]})
    after = json.loads((tmp_path / "certificates.json").read_text(encoding="utf-8"))
    assert list(after["rows"]) == list(before["rows"])
    assert after["rows"]["torch, 1 rank"]["reports"] == [report]
    assert after["rows"]["torch, 2 ranks"] == before["rows"]["torch, 2 ranks"]
    assert after["figures"]["rows equal"] == sum(one["ok"] for one in after["rows"].values())


@pytest.mark.nightly
@pytest.mark.takes(60)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, marks=pytest.mark.needs(MODULES.get(row.stack, row.stack)), id=f"{row.stack}, {row.how}"
        )
        for row in rows()
    ],
)
def test_a_program_resumes_as_the_page_says(row):
    found = json.loads(FILE.read_text(encoding="utf-8"))["rows"][f"{row.stack}, {row.how}"]
    facts = certified(row)
    assert [one["ok"] for one in facts["reports"]] == [one["ok"] for one in found["reports"]], facts["text"]
