"""The digest that is computed while a file is written is that of the file."""

import os
import tracemalloc

import pytest
import torch
import xxhash
from tp_core.state import FileRecord, record_of, write_whole
from tp_core.tensors import _digests
from tp_core.tensors._digests import DigestingFile  # private: who wrote a file cannot be seen in it

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


def test_a_file_is_known_again_by_its_digest(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (PIECE + 3))
    record = record_of(path)
    assert FileRecord(**record.to_dict()) == record
    assert record.difference(path) is None
    path.write_bytes(b"x" * (PIECE + 2) + b"y")
    assert record.difference(path) == "is not what was written"


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


def test_the_digest_is_xxh3_of_the_pieces_digests(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * PIECE + b"yz")
    pieces = xxhash.xxh3_128_digest(b"x" * PIECE) + xxhash.xxh3_128_digest(b"yz")
    assert record_of(path) == FileRecord(PIECE + 2, xxh3_128=xxhash.xxh3_128_hexdigest(pieces))


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on files")
def test_the_system_writes_each_piece_at_once_and_keeps_the_last_ones_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(_digests, "PIECE", 1000)
    monkeypatch.setattr(_digests, "_CHUNK", 300)
    advised = []

    def advise(handle, start, length, advice):
        advised.append((start, start + length, os.fstat(handle).st_size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    with (tmp_path / "file").open("wb") as file:
        digesting = DigestingFile(file)
        for _ in range(3):
            digesting.write(b"x" * 2100)
    # All that is advised on has been handed to the system before.
    assert advised == [(max(0, end - 4000), end, end) for end in range(1000, 6001, 1000)]
