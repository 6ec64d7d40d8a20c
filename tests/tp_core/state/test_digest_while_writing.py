"""The digest that is computed while a file is written is that of the file."""

import json
import sys
import tracemalloc

import pytest
import torch
import xxhash
from tp_core._tensors._digests import DigestingFile  # private: who wrote a file cannot be seen in it
from tp_core.errors import StateError
from tp_core.internal import DIGESTS, read_digests
from tp_core.state import FileRecord, record_of, write_whole

PIECE = 16 << 20


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([], id="nothing"),
        pytest.param([1, 3], id="a few bytes"),
        pytest.param([PIECE // 2, 7, PIECE // 2, 100_000], id="over the end of a piece"),
        pytest.param([2 * PIECE + 5], id="several pieces at once"),
    ],
)
def test_the_record_of_a_written_file_is_that_of_the_file_on_the_disk(tmp_path, sizes):
    tensors = {str(i): torch.randint(255, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}

    record = write_whole(tensors, tmp_path / "tensors.pt")

    assert record == record_of(tmp_path / "tensors.pt")


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_a_file_with_any_of_the_digests_is_known_again(tmp_path, algorithm):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (PIECE + 3))
    record = record_of(path, algorithm)
    assert record.algorithm == algorithm
    assert FileRecord(**record.to_dict()) == record
    assert record.difference(path) is None
    path.write_bytes(b"x" * (PIECE + 2) + b"y")
    assert record.difference(path) == "is not what was written"


@pytest.mark.parametrize("digests", [{}, {"sha256": "0", "xxh3_128": "0"}])
def test_a_record_has_one_digest(digests):
    with pytest.raises(TypeError, match="one digest"):
        FileRecord(3, **digests)


def test_what_is_written_is_read_back(tmp_path):
    tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}

    write_whole(tensors, tmp_path / "tensors.pt")

    read = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_bytes_that_are_used_otherwise_after_they_were_written_are_digested_as_they_were(tmp_path):
    path, data = tmp_path / "file", bytearray(range(256)) * (PIECE // 256)
    with path.open("wb") as file:
        digesting = DigestingFile(file)
        for number in range(3):
            data[0] = number
            digesting.write(data)
        data[:] = bytes(PIECE)
        digesting.flush()
        assert digesting.record() == record_of(path)


def test_what_is_written_is_not_copied(tmp_path):
    tensor = torch.arange(PIECE // 8)
    with (tmp_path / "file").open("wb") as file:
        digesting = DigestingFile(file)
        peak = tracemalloc_peak(lambda: torch.save({"x": tensor}, digesting))
        digesting.flush()
        assert digesting.record() == record_of(tmp_path / "file")
    assert peak < PIECE // 2


def tracemalloc_peak(call):
    """Return how many bytes Python had at most during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def without_xxhash(monkeypatch):
    """Let xxhash not be importable."""
    monkeypatch.setitem(sys.modules, "xxhash", None)


def test_the_digest_is_xxh3_of_the_pieces_digests(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * PIECE + b"yz")
    pieces = xxhash.xxh3_128_digest(b"x" * PIECE) + xxhash.xxh3_128_digest(b"yz")
    assert record_of(path) == FileRecord(PIECE + 2, xxh3_128=xxhash.xxh3_128_hexdigest(pieces))


@pytest.mark.usefixtures("without_xxhash")
def test_without_xxhash_digests_are_by_sha256(tmp_path):
    record = write_whole({"a": torch.arange(5.0)}, tmp_path / "tensors.pt")
    assert list(record.to_dict()) == ["nbytes", "sha256"]
    assert record.difference(tmp_path / "tensors.pt") is None


def test_digests_by_xxh3_are_refused_by_a_sentence_where_xxhash_is_missing(tmp_path, request):
    write_whole({"a": torch.arange(5.0)}, tmp_path / "file")
    listed = {"file": record_of(tmp_path / "file").to_dict()}
    (tmp_path / DIGESTS).write_text(json.dumps(listed))
    assert read_digests(tmp_path)["file"].difference(tmp_path / "file") is None
    request.getfixturevalue("without_xxhash")
    with pytest.raises(StateError, match=r"digests\.json has digests by xxh3_128, which need xxhash .* pip"):
        read_digests(tmp_path)
