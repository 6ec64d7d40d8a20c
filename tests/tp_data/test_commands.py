"""`tp data`: indexes, lengths, and the samples of a step."""

import json

import pytest
from tp_core.plugins import registry
from tp_data import Loader, Stream
from tp_testing import CommandConformance

from tests.run_tp import run

ROWS = [{"text": "x" * (i * 37 % 100), "id": i} for i in range(50)]
SCRIPT = """
from tp_data import Loader, Stream
print("of the script")

def make():
    return Loader(Stream(range(100), shuffle=True, seed=3), 8)

def nothing():
    return 3
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "train.py").write_text(SCRIPT)


@pytest.mark.nightly
class TestData(CommandConformance):
    (command,) = [c.item for c in registry.commands() if c.item.name == "data"]
    arguments = ("index", "a.jsonl")


def call(capsys, *words):
    status = run(["data", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_an_index_is_made_of_files_and_sources_have_names(capsys, tmp_path):
    status, out, _ = call(capsys, "index", "first=a.jsonl", "second=b.jsonl")
    assert status == 0
    assert out.startswith("first: 50 samples, digest ")
    assert (tmp_path / ".tp-data" / "b.jsonl.json.index").exists()
    status, _, err = call(capsys, "index", "first=a.jsonl", "b.jsonl")
    assert status == 2
    assert "give each source a name of its own, NAME=FILES, or none of them" in err


def test_a_look_has_counts_lengths_and_samples(capsys):
    _, out, _ = call(capsys, "look", "a.jsonl", "--field", "text", "--samples", "1")
    assert "data: 50 samples\nlength of 50: 0 to 99, mean 48.5\n" in out
    assert out.splitlines()[-1].startswith("a.jsonl, sample ")
    _, out, _ = call(capsys, "look", "a.jsonl", "--json", "--field", "text")
    found = json.loads(out)
    assert sum(count for _, _, count in found["histogram"]) == found["looked_at"] == 50
    status, _, err = call(capsys, "look", "a.jsonl", "--field", "words")
    assert status == 2
    assert "a sample has no field 'words'; it is ['text', 'id']" in err


def test_the_samples_of_a_step_are_those_of_the_loader(capsys):
    loader = Loader(Stream(range(100), shuffle=True, seed=3), 8)
    steps = [batch.tolist() for _ in range(2) for batch in loader]
    for step in (1, 10, 13, 20):
        _, out, _ = call(capsys, "order", "train.py:make", "--ranks", "3", "--step", str(step), "--json")
        found = json.loads(out)
        assert [sample["index"] for sample in found["samples"]] == steps[step - 1]
        assert found["epoch"] == (step - 1) // 13
    _, out, _ = call(capsys, "order", "a.jsonl", "--batch", "4", "--ranks", "2", "--step", "3")
    assert [line.split()[:5] for line in out.splitlines()[2:]] == [
        ["0", "0", "8", "data", "8"],
        ["0", "1", "9", "data", "9"],
        ["1", "0", "10", "data", "10"],
        ["1", "1", "11", "data", "11"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jsonl"], "give --batch, the samples of a step"),
        (["train.py:make", "--batch", "8"], "train.py:make makes the loader"),
        (["train.py:nothing"], "train.py:nothing must return a tp_data.Loader, got int"),
    ],
)
def test_what_has_no_order_is_refused(words, message, capsys):
    status, out, err = call(capsys, "order", *words)
    assert (status, "rank" in out) == (2, False)
    assert message in err
