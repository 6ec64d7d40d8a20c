"""Named tensors in a folder: whole, in slices, damaged, and of strangers."""

import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from tp_core.data import split_evenly
from tp_core.errors import StateError
from tp_core.state import read_tensors, record_of, tensor_infos, write_tensors
from tp_core.tensors import TensorSlice
from tp_testing import run_ranks

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.tensor(7),
    "c": torch.ones(5, dtype=torch.bfloat16),
}


def empty_like(tensors):
    return {name: torch.empty_like(t) for name, t in tensors.items()}


def test_what_is_written_is_read(tmp_path):
    write_tensors(TENSORS, tmp_path / "new")
    found = empty_like(TENSORS)
    read_tensors(found, tmp_path / "new")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    infos = tensor_infos(tmp_path / "new")
    assert {n: (i.shape, i.dtype) for n, i in infos.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in TENSORS.items()
    }


@given(rows=st.integers(1, 9), parts=st.integers(1, 4), dim=st.integers(0, 1))
def test_any_slices_of_a_whole_can_be_read(tmp_path_factory, rows, parts, dim):
    folder = tmp_path_factory.mktemp("slices")
    whole = torch.arange(rows * 6.0).reshape(rows, 6)
    write_tensors({"w": whole}, folder)
    for part in split_evenly(whole.size(dim), min(parts, whole.size(dim))):
        expected = whole.narrow(dim, part.start, part.stop - part.start)
        offsets = (part.start, 0) if dim == 0 else (0, part.start)
        target = torch.empty(expected.shape)
        read_tensors({"w": TensorSlice(tuple(whole.shape), [(offsets, target)])}, folder)
        assert torch.equal(target, expected)


def test_a_slice_may_have_several_parts(tmp_path):
    whole = torch.arange(12.0).reshape(6, 2)
    mine = torch.empty(4, 2)  # rows 0, 1 and 4, 5
    write_tensors({"w": whole}, tmp_path)
    read_tensors({"w": TensorSlice((6, 2), [((0, 0), mine[:2]), ((4, 0), mine[2:])])}, tmp_path)
    assert torch.equal(mine, whole[[0, 1, 4, 5]])


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last), id="strided"),
        pytest.param(torch.randn(4, 2).t(), id="transposed"),
        pytest.param(torch.randn(2, 4).to(torch.float8_e4m3fn), id="eight bits"),
        pytest.param(torch.randn(2, 4, dtype=torch.complex64), id="complex"),
        pytest.param(torch.randn(2, 4, dtype=torch.complex128), id="a type that safetensors lack"),
        pytest.param(torch.tensor([[True, False], [False, False]]), id="truth"),
        pytest.param(torch.randn(40, 3)[5:7], id="a part of a larger one"),
    ],
)
def test_parts_of_unusual_tensors_are_read(tmp_path, whole):
    write_tensors({"before": torch.ones(7), "w": whole}, tmp_path)
    expected = whole[1:, 1:]
    target = torch.empty(expected.shape, dtype=whole.dtype)
    read_tensors(
        {"w": TensorSlice(tuple(whole.shape), [((1, 1, *[0] * (whole.dim() - 2)), target)])}, tmp_path
    )
    assert target.tolist() == expected.tolist()


def test_the_place_of_a_tensor_may_be_of_another_type_or_lie_in_pieces(tmp_path):
    write_tensors(TENSORS, tmp_path)
    wide, turned = torch.empty(3, 4, dtype=torch.float64), torch.empty(4, 3).t()
    read_tensors({"a": wide}, tmp_path)
    read_tensors({"a": turned}, tmp_path)
    assert torch.equal(wide, TENSORS["a"].double())
    assert torch.equal(turned, TENSORS["a"])


def test_what_was_written_comes_with_the_digests_of_its_files(tmp_path):
    records = write_tensors({"large": torch.arange(5_000_000), **TENSORS}, tmp_path)
    assert set(records) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert all(record == record_of(tmp_path / name) for name, record in records.items())


def test_files_are_checked_where_the_system_cannot_read_at_a_position(tmp_path, monkeypatch):
    """As on Windows."""
    expected = write_tensors({"w": torch.arange(5_000_000)}, tmp_path)
    monkeypatch.delattr(os, "preadv", raising=False)
    assert all(record == record_of(tmp_path / name) for name, record in expected.items())


def test_a_file_of_other_tensors_is_an_error_before_anything_is_touched(tmp_path):
    write_tensors(TENSORS, tmp_path)
    (data,) = tmp_path.glob("*.safetensors")
    target = torch.full((3, 4), -1.0)
    for change, message in [
        (lambda: write_tensors({"a": torch.ones(3, 5)}, tmp_path / "other"), r"has .*\(3, 5\).* for 'a'"),
        (lambda: write_tensors({"x": torch.ones(3)}, tmp_path / "other"), "it has None for 'a'"),
    ]:
        change()
        (tmp_path / "other" / data.name).replace(data)
        with pytest.raises(StateError, match=message):
            read_tensors({"a": target}, tmp_path)
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(StateError, match=r"__0_0\.safetensors is damaged"):
        read_tensors({"a": target}, tmp_path)
    data.unlink()
    with pytest.raises(StateError, match=r"cannot be read: No such file.*__0_0\.safetensors"):
        read_tensors({"a": target}, tmp_path)
    assert (target == -1).all()


def test_several_parts_of_a_tensor_on_one_rank_are_kept_and_torch_reads_them(tmp_path):
    whole = torch.arange(12.0).reshape(6, 2)
    write_tensors({"w": TensorSlice((6, 2), [((0, 0), whole[:2]), ((2, 0), whole[2:])])}, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    found = {"w": torch.empty(6, 2)}
    read_tensors(found, tmp_path)
    assert torch.equal(found["w"], whole)
    by_torch = {"w": torch.empty(6, 2)}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that one process reads alone
        load(by_torch, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(by_torch["w"], whole)


def write_shards(folder):
    dist.init_process_group("gloo")
    rows = split_evenly(5, 2)[dist.get_rank()]
    whole = torch.arange(10.0).reshape(5, 2)
    mine = TensorSlice((5, 2), [((rows.start, 0), whole[rows].clone())])
    whole_ones = {"same": torch.ones(3), "own": torch.full((2,), 1.0 + dist.get_rank())}
    records = write_tensors({"w": mine, **whole_ones}, folder, together=True)
    assert all(name.startswith(f"__{dist.get_rank()}_") for name in records)
    other = torch.empty(5, 1)
    read_tensors({"w": TensorSlice((5, 2), [((0, dist.get_rank()), other)])}, folder)
    return other.flatten().tolist()


def test_ranks_write_slices_together_and_read_others(tmp_path):
    columns = run_ranks(write_shards, 2, tmp_path)
    assert columns == [[0.0, 2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0, 7.0, 9.0]]
    found = {"w": torch.empty(5, 2), "same": torch.empty(3), "own": torch.empty(2)}
    read_tensors(found, tmp_path)
    assert found["w"].flatten().tolist() == list(range(10))
    assert found["same"].tolist() == [1.0, 1.0, 1.0]
    assert found["own"].tolist() == [1.0, 1.0]  # the first rank's


def test_a_missing_name_and_another_shape_are_named_before_anything_is_touched(tmp_path):
    write_tensors(TENSORS, tmp_path)
    target = torch.full((3, 4), -1.0)
    with pytest.raises(StateError, match="lacks 'missing'"):
        read_tensors({"a": target, "missing": torch.empty(1)}, tmp_path)
    with pytest.raises(StateError, match=r"'b' of shape \(\), not \(2,\)"):
        read_tensors({"a": target, "b": torch.empty(2)}, tmp_path)
    assert (target == -1).all()


def test_a_folder_without_an_index_and_a_cut_off_file_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        tensor_infos(tmp_path)
    write_tensors(TENSORS, tmp_path)
    (data,) = tmp_path.glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(StateError, match=r"__0_0\.safetensors is damaged"):
        read_tensors(empty_like(TENSORS), tmp_path)


W = {"dtype": "float32", "shape": [4], "parts": [[[0], [4], "__0_0.safetensors"]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "RecursionError"),
        ("[]", "AttributeError"),
        ({"w": 3}, "TypeError"),
        ({"w": W | {"dtype": "load"}}, "KeyError"),
        ({"w": W | {"shape": [-4]}}, "are not sizes"),
        ({"w": W | {"shape": [4.0]}}, "are not sizes"),
        ({"w": W | {"parts": [[[2], [4], "__0_0.safetensors"]]}}, r"a part of \[4\] at \[2\] is not within"),
        ({"w": W | {"parts": [[[0, 0], [4], "__0_0.safetensors"]]}}, "ValueError"),
        ({"w": W | {"parts": [[[0], [4], "../secret.safetensors"]]}}, "is not a file beside it"),
        ({"w": W | {"parts": [[[0], [3], "__0_0.safetensors"]]}}, "it lacks a part of 'w', or has one twice"),
        (
            {"w": W | {"parts": [[[0], [4], "__0_0.safetensors"]] * 2}},
            "it lacks a part of 'w', or has one twice",
        ),
    ],
    ids=range(12),
)
def test_a_damaged_index_is_named(tmp_path, text, message):
    write_tensors({"w": torch.ones(4)}, tmp_path)
    (tmp_path / "index.json").write_text(text if isinstance(text, str) else json.dumps(text))
    target = torch.zeros(4)
    with pytest.raises(StateError, match=rf"index\.json is damaged.*({message})"):
        read_tensors({"w": target}, tmp_path)
    assert not target.any()


def test_writing_and_reading_leave_the_filters_of_warnings_as_they_were(tmp_path):
    before = list(warnings.filters)
    write_tensors(TENSORS, tmp_path)
    read_tensors(empty_like(TENSORS), tmp_path)
    assert warnings.filters == before
