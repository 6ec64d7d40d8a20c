"""Weights in the safetensors format, in one file or several with an index, tensor by tensor.

https://github.com/huggingface/safetensors: eight bytes with the header's length, the header as JSON, the
tensors in little-endian order. The format's own library reads the files. It writes only tensors that are all
in memory; here one tensor at a time is.
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tp_core.errors import ConfigError, StateError
from tp_core.files._atomic import atomic_part
from tp_core.modules._parameters import TensorSlice, fill_from_whole
from tp_core.tensors._digests import DigestingFile
from tp_core.tensors._stored import StoredTensors, TensorInfo, check_targets

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype; ``None`` for one that it lacks."""
    return _NAMES.get(dtype)


# -- writing ---------------------------------------------------------------------------------------


def check_weights_name(path: Path) -> None:
    """Check the name of a file of weights, by which it is read as safetensors; equal on all ranks.

    Raises:
        ConfigError: It does not end in ".safetensors".
    """
    if path.suffix != _SUFFIX:
        if path.name:
            named = path.with_suffix(_SUFFIX)
        else:
            named = path / f"model{_SUFFIX}"
        msg = (
            f"weights are written as safetensors: the name ends in {_SUFFIX}, got {str(path)!r}; write "
            f"{str(named)!r}"
        )
        raise ConfigError(msg)


def split_over_files(
    infos: Mapping[str, TensorInfo], path: Path, max_file_nbytes: int | None
) -> dict[Path, list[str]]:
    """Return the names of each file's tensors: one file, or several with the names of Hugging Face.

    Raises:
        ConfigError: ``path`` does not end in ".safetensors".
    """
    check_weights_name(path)
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if max_file_nbytes is not None and groups[-1] and size + info.nbytes > max_file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.nbytes
    if len(groups) == 1:
        return {path: groups[0]}
    total = len(groups)
    return {
        path.with_name(f"{path.stem}-{i:05d}-of-{total:05d}{_SUFFIX}"): names
        for i, names in enumerate(groups, start=1)
    }


def write_safetensors(
    path: Path,
    files: Mapping[Path, Sequence[str]],
    infos: Mapping[str, TensorInfo],
    streams: Iterable[Iterable[tuple[str, Tensor]]],
) -> list[Path]:
    """Write weights into the files of :func:`split_over_files`, and an index of several; return the files.

    The index is last. Existing files are replaced at the end. The caller must own ``path`` if there are
    several: otherwise the files of two processes could be mixed.

    Args:
        path: The file, or the name from which those of several files are made.
        files: The files, each with the names of its tensors.
        infos: The shape and the dtype of each tensor, by name.
        streams: The tensors of each file, by name, in any order; one at a time is asked for.

    Raises:
        OSError: A file cannot be written; all old files are unchanged.
    """
    several = len(files) > 1
    index = path.with_name(path.stem + _INDEX_SUFFIX)
    with ExitStack() as parts:
        for (file, names), tensors in zip(files.items(), streams, strict=True):
            part = parts.enter_context(atomic_part(file))
            with part.open("wb") as opened:
                write_file(opened, {name: infos[name] for name in names}, tensors)
        if several:  # a kill from here on leaves files without an index, and no mixture of old and new
            index.unlink(missing_ok=True)
    if not several:
        return list(files)
    nbytes = sum(info.nbytes for info in infos.values())
    weight_map = {name: file.name for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=2)
    with atomic_part(index) as part:
        part.write_text(text)
    path.unlink(missing_ok=True)  # readers would prefer an older single file to the index
    return [*files, index]


def in_file_order(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names in the order in which their tensors lie in a file.

    Large elements are first: then each tensor begins at a multiple of its element size, which readers need.
    """
    return sorted(infos, key=lambda name: -_encoded(infos[name]).dtype.itemsize)


def _encoded(info: TensorInfo) -> TensorInfo:
    """Return how a tensor is in a file: bytes, where the format lacks its dtype."""
    if info.dtype in _NAMES:
        return info
    return TensorInfo((info.nbytes,), torch.uint8)


def write_file(
    file: BinaryIO | DigestingFile,
    infos: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write tensors into one open file, as they come; a file that cannot seek gets them `in_file_order`."""
    begins: dict[str, int] = {}
    end = 0
    for name in in_file_order(infos):
        begins[name] = end
        end += infos[name].nbytes
    versions = {"torch": torch.__version__, "tp-core": version("tp-core")}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **versions, **metadata}}
    for name, info in infos.items():
        encoded = _encoded(info)
        header[name] = {
            "dtype": _NAMES[encoded.dtype],
            "shape": list(encoded.shape),
            "data_offsets": [begins[name], begins[name] + info.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors to 8 bytes
    start = file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors:
        if not isinstance(file, DigestingFile):
            file.seek(start + begins[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)


# -- reading ---------------------------------------------------------------------------------------


_MAX_MAPPED_NBYTES = 1 << 25


def is_safetensors(path: Path) -> bool:
    """Return whether a path has weights in this format: a file, an index, or a folder with an index."""
    return path.name.endswith((_SUFFIX, _INDEX_SUFFIX)) or (path.is_dir() and bool(_indexes_in(path)))


class SafetensorsFiles(StoredTensors):
    """The tensors of a safetensors file, or of a folder with one or several, with or without an index.

    A rank reads only its slices, straight into their places.

    Args:
        path: The file, the index or the folder.
        prefix: A prefix for the names in the files.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: A file or the index is damaged, or they do not fit each other.
    """

    def __init__(self, path: str | os.PathLike[str], *, prefix: str = "") -> None:
        self.path = Path(path)
        self._prefix = prefix
        self._files: dict[str, Path] = {}
        infos: dict[str, TensorInfo] = {}
        for file, indexed in _files_of(self.path):
            with _opened(file) as stored:
                names = set(stored.keys())
                listed = names if indexed is None else indexed
                for name in listed:
                    if name not in names:
                        msg = f"the index of {path} has {name!r} in {file.name}, which lacks it"
                        raise StateError(msg)
                    full_name = prefix + name
                    if full_name in infos:
                        msg = f"{name!r} is in two files: {self._files[full_name].name} and {file.name}"
                        raise StateError(msg)
                    infos[full_name] = _info_of(stored, name, file)
                    self._files[full_name] = file
        self.infos = dict(sorted(infos.items()))

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        check_targets(targets, self.infos, self.path)
        by_file: dict[Path, dict[str, Tensor | TensorSlice]] = {}
        for name, target in targets.items():
            by_file.setdefault(self._files[name], {})[name.removeprefix(self._prefix)] = target
        for file, of_file in by_file.items():
            fill_from_file(file, of_file, {name: self.infos[self._prefix + name] for name in of_file})


def check_file(file: Path, infos: Mapping[str, TensorInfo]) -> None:
    """Raise unless a file has tensors of these shapes and dtypes.

    Raises:
        OSError: There is no such file, or it cannot be read.
        StateError: It is damaged, or has others.
    """
    with _opened(file) as stored:
        names = set(stored.keys())
        for name, info in infos.items():
            if name in names:
                stored_info = _info_of(stored, name, file)
            else:
                stored_info = None
            if stored_info != _encoded(info):
                msg = (
                    f"{file} is damaged: it has {stored_info} for {name!r}, and its index has "
                    f"{_encoded(info)}"
                )
                raise StateError(msg)


def fill_from_file(
    file: Path, targets: Mapping[str, Tensor | TensorSlice], infos: Mapping[str, TensorInfo]
) -> None:
    """Fill tensors, or slices of them, from the tensors of a file, which have these shapes and dtypes."""
    names = deque(targets)
    while names:
        # Pages that were read of a mapped file count as this process's memory until it is closed.
        nbytes = 0
        with _opened(file) as stored:
            while names and nbytes < _MAX_MAPPED_NBYTES:
                name = names.popleft()
                info = infos[name]
                if info.dtype not in _NAMES:
                    value = stored.get_tensor(name).clone().view(info.dtype).reshape(info.shape)
                elif info.shape:
                    value = stored.get_slice(name)
                else:
                    value = stored.get_tensor(name)
                fill_from_whole(targets[name], value)
                nbytes += info.nbytes


def _info_of(stored: Any, name: str, file: Path) -> TensorInfo:
    entry = stored.get_slice(name)
    dtype = _DTYPES.get(entry.get_dtype())
    if dtype is None:
        msg = f"{file} has {name!r} of type {entry.get_dtype()}, and the types that are read are {[*_DTYPES]}"
        raise StateError(msg)
    return TensorInfo(tuple(entry.get_shape()), dtype)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Map a file into memory; an error of the library becomes one that names the file."""
    from safetensors import SafetensorError, safe_open  # here, so that other programs need not load it

    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        msg = f"{file} is damaged: {error}"
        raise StateError(msg) from error


def _indexes_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_INDEX_SUFFIX}"))


def _files_of(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Yield the files, each with the names that an index says are in it; ``None`` for all."""
    if path.is_file() and not path.name.endswith(_INDEX_SUFFIX):
        yield path, None
        return
    indexes = [path] if path.is_file() else _indexes_in(path)
    if len(indexes) > 1:
        msg = f"{path} has several indexes, {', '.join(i.name for i in indexes)}: give the one that is meant"
        raise StateError(msg)
    if not indexes:
        files = sorted(path.glob(f"*{_SUFFIX}"))
        if not files:
            msg = f"there is no safetensors file at {path}"
            raise FileNotFoundError(msg)
        for file in files:
            yield file, None
        return
    (index,) = indexes
    try:
        places: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file_name in places.items():
            names.setdefault(file_name, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{index} is damaged: {error!r}"
        raise StateError(msg) from error
    for file_name, own in names.items():
        if Path(file_name).name != file_name:
            msg = f"{index} is damaged: it names {file_name!r}, which is not a file beside it"
            raise StateError(msg)
        yield index.parent / file_name, own
