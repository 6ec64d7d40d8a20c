"""Weights in the safetensors format: written and read by tp-core, readable by the library of the format."""

import json

import pytest
import safetensors.torch
import torch
from tp_core.errors import StateError
from tp_core.state import (
    SafetensorsFiles,
    TensorInfo,
    is_safetensors,
    safetensors_dtype,
    split_over_files,
    write_safetensors,
)
from tp_core.tensors import TensorSlice


def infos_of(tensors):
    return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def write(path, tensors, *, max_file_nbytes=None):
    infos = infos_of(tensors)
    files = split_over_files(infos, path, max_file_nbytes)
    streams = [[(name, tensors[name]) for name in names] for names in files.values()]
    return write_safetensors(path, files, infos, streams)


def test_every_type_of_the_library_is_written_and_read(tmp_path):
    for name, dtype in safetensors.torch._TYPES.items():
        assert safetensors_dtype(dtype) == name
        tensor = torch.ones(3, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        write(tmp_path / "one.safetensors", {"x": tensor})
        found = safetensors.torch.load_file(tmp_path / "one.safetensors")["x"]
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert SafetensorsFiles(tmp_path / "one.safetensors").infos == infos_of({"x": tensor})
    assert safetensors_dtype(torch.complex128) is None


def test_each_tensor_begins_at_a_multiple_of_its_element_size(tmp_path):
    tensors = {"truth": torch.tensor([True, False, True]), "half": torch.ones(3, dtype=torch.float16)}
    tensors |= {"double": torch.ones(1, dtype=torch.float64), "single": torch.ones(5)}
    path = tmp_path / "model.safetensors"
    write(path, tensors)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name, tensor in tensors.items():
        assert (start + header[name]["data_offsets"][0]) % tensor.element_size() == 0


@pytest.mark.parametrize("max_mapped", [1, 1 << 30])
def test_slices_are_read_out_of_several_files(tmp_path, monkeypatch, max_mapped):
    monkeypatch.setattr("tp_core.tensors._safetensors._MAX_MAPPED_NBYTES", max_mapped)
    tensors = {f"t{i}": torch.arange(12.0).reshape(3, 4) + i for i in range(5)} | {"n": torch.tensor(3)}
    files = write(tmp_path / "m.safetensors", tensors, max_file_nbytes=100)
    assert len(files) > 2
    assert is_safetensors(tmp_path)
    for path in (tmp_path, files[-1]):
        stored = SafetensorsFiles(path, prefix="model.")
        assert stored.infos == infos_of({f"model.{name}": tensors[name] for name in sorted(tensors)})
        column, number = torch.empty(3, 1), torch.tensor(0)
        targets = {f"model.t{i}": TensorSlice((3, 4), [((0, i - 1), column.clone())]) for i in (1, 3)}
        stored.fill({**targets, "model.n": number})
        assert number == 3
        for i in (1, 3):
            ((_, part),) = targets[f"model.t{i}"].parts
            assert torch.equal(part, tensors[f"t{i}"][:, i - 1 : i])


def test_what_is_missing_is_named_before_anything_is_filled(tmp_path):
    write(tmp_path / "m.safetensors", {"a": torch.ones(2)})
    target = torch.zeros(2)
    with pytest.raises(StateError, match=r"m\.safetensors lacks 'b'; it has a"):
        SafetensorsFiles(tmp_path / "m.safetensors").fill({"a": target, "b": torch.zeros(2)})
    assert not target.any()


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    write(tmp_path / "m.safetensors", {"a": torch.ones(2)})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "m.safetensors"}}))
    with pytest.raises(StateError, match=r"has 'b' in m\.safetensors, which lacks it"):
        SafetensorsFiles(tmp_path)
    (tmp_path / "n.safetensors.index.json").write_text("{}")
    with pytest.raises(
        StateError, match=r"several indexes, m\.safetensors\.index\.json, n\.safe.*that is meant"
    ):
        SafetensorsFiles(tmp_path)


def test_a_type_that_torch_lacks_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(StateError, match=r"has 'a' of type F6_E2M3, and the types that are read are"):
        SafetensorsFiles(tmp_path / "m.safetensors")
