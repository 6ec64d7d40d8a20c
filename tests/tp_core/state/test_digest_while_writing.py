"""The digest that is computed while a file is written is that of the file."""

import pytest
import torch
from tp_core.state import record_of, write_whole

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


def test_what_is_written_is_read_back(tmp_path):
    tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}

    write_whole(tensors, tmp_path / "tensors.pt")

    read = torch.load(tmp_path / "tensors.pt", weights_only=True)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
