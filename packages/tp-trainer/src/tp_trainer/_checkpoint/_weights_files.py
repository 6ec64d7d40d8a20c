"""Weights in the safetensors format, in one file or several with an index, tensor by tensor.

https://github.com/huggingface/safetensors: eight bytes with the header's length, the header as JSON, the
tensors in little-endian order. The format's own library needs all tensors in memory; here one tensor is.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError, StateError
from tp_core.internal import atomic_part, write_atomically
from tp_core.state import StoredTensors, TensorInfo, fill_from_whole

INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"


def split_over_files(
    state: Mapping[str, Tensor], path: Path, max_file_nbytes: int | None
) -> dict[Path, list[str]]:
    """Return the names of each file's tensors: one file, or several with the names of Hugging Face.

    Args:
        state: The tensors; only their shapes and types are used.
        path: The one file.
        max_file_nbytes: The largest size of a file, unless a single tensor is larger; ``None`` for one
            file.

    Raises:
        ConfigError: There would be several files, and ``path`` does not end in ".safetensors".
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.element_size()
        if max_file_nbytes is not None and groups[-1] and size + nbytes > max_file_nbytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {path: groups[0]}
    if path.suffix != _SUFFIX:
        msg = f"weights in several files need a name that ends in {_SUFFIX}, got {path.name!r}"
        raise ConfigError(msg)
    total = len(groups)
    return {
        path.with_name(f"{path.stem}-{i:05d}-of-{total:05d}{_SUFFIX}"): names
        for i, names in enumerate(groups, start=1)
    }


@cache
def type_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a type; ``None`` for a type that it lacks."""
    from safetensors.torch import save

    try:
        file = save({"": torch.empty(0, dtype=dtype)})
    except KeyError:  # how the library reports a type that it lacks
        return None
    name: str = json.loads(file[8:])[""]["dtype"]
    return name


def write_weights(infos: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], part: Path) -> None:
    """Write tensors one after the other, in the order of their arrival.

    Args:
        infos: Tensors with the shapes and types of the written ones, by name.
        tensors: The tensors, in any order.
        part: The file.

    Raises:
        OSError: The disk is full, or writing is not allowed.
    """
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "torch": torch.__version__, "tp-trainer": version("tp-trainer")}
    }
    end = 0
    # Large elements first: then each tensor begins at a multiple of its element size, which readers need.
    for name in sorted(infos, key=lambda name: -infos[name].element_size()):
        tensor = infos[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": type_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(plain.view(torch.uint8).numpy().data if plain.numel() else b"")


def write_files(
    path: Path,
    files: Mapping[Path, Sequence[str]],
    infos: Mapping[str, Tensor],
    streams: Iterable[Iterable[tuple[str, Tensor]]],
) -> list[Path]:
    """Write weights into their files, and an index of several; existing files are replaced at the end.

    The caller must own ``path``: otherwise the files of two processes could be mixed.

    Args:
        path: The one file, or the name from which several names are made.
        files: The names of :func:`split_over_files`.
        infos: As in :func:`write_weights`, of all files.
        streams: The tensors of each file.

    Returns:
        The files, the index last.

    Raises:
        OSError: The disk is full, or writing is not allowed.
    """
    several = len(files) > 1
    index = path.with_name(path.stem + INDEX_SUFFIX)
    with ExitStack() as parts:
        for (file, names), tensors in zip(files.items(), streams, strict=True):
            part = parts.enter_context(atomic_part(file))
            write_weights({name: infos[name] for name in names}, tensors, part)
        if several:  # a kill from here on leaves files without an index, and no mixture of old and new
            index.unlink(missing_ok=True)
    if not several:
        return list(files)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in infos.values())
    weight_map = {name: file.name for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}, indent=2)
    write_atomically(partial(_write_text, text), index)
    path.unlink(missing_ok=True)  # readers would prefer an older single file to the index
    return [*files, index]


def _write_text(text: str, part: Path) -> None:
    part.write_text(text)


# -- reading --------------------------------------------------------------------------------------


def is_weights(path: Path) -> bool:
    """Return whether a path has weights in this format: a file, an index, or a folder with an index."""
    return path.name.endswith((_SUFFIX, INDEX_SUFFIX)) or (path.is_dir() and _index_in(path) is not None)


def _index_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"*{INDEX_SUFFIX}"))), None)


class WeightsFiles(StoredTensors):
    """The tensors of one or several files; a rank reads only its slices.

    Raises:
        FileNotFoundError: The file does not exist, or one that the index names.
        StateError: A file or the index is damaged.
    """

    def __init__(self, path: Path, *, prefix: str = "") -> None:
        self.path, self._prefix = path, prefix
        self._files: dict[str, Path] = {}
        infos: dict[str, TensorInfo] = {}
        for file in _files_of(path):
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                    shape = tuple(tensors.get_slice(name).get_shape())
                    infos[prefix + name] = TensorInfo(shape, _type_of(tensors, name))
                    self._files[prefix + name] = file
        self.infos = dict(sorted(infos.items()))

    def fill(self, targets: Mapping[str, Any]) -> None:
        """Fill whole tensors, or a rank's slices of them; names and shapes are known to fit."""
        by_file: dict[Path, list[str]] = {}
        for name in targets:
            by_file.setdefault(self._files[name], []).append(name)
        for file, names in by_file.items():
            with _opened(file) as tensors:
                for name in names:
                    plain = name.removeprefix(self._prefix)
                    is_scalar = not self.infos[name].shape
                    value = tensors.get_tensor(plain) if is_scalar else tensors.get_slice(plain)
                    fill_from_whole(targets[name], value)


def _files_of(path: Path) -> list[Path]:
    """Return the files of weights.

    Raises:
        FileNotFoundError: The file does not exist.
        StateError: The index is damaged.
    """
    if path.is_dir():
        path = _index_in(path) or path
    if not path.name.endswith(INDEX_SUFFIX):
        return [path]
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        msg = f"{path} is damaged: it is not an index of weights: {error!r}"
        raise StateError(msg) from error
    if any(Path(name).name != name for name in names):
        msg = f"{path} is damaged: it names a file outside of its folder"
        raise StateError(msg)
    return [path.with_name(name) for name in sorted(names)]


def _opened(file: Path) -> Any:
    """Open a file.

    Raises:
        FileNotFoundError: The file does not exist.
        StateError: The file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        msg = f"{file} cannot be read as weights: {error}"
        raise StateError(msg) from error


def _type_of(tensors: Any, name: str) -> torch.dtype:
    """Return the type of a tensor in an open file, read from its first row."""
    found = tensors.get_slice(name)
    has_rows = math.prod(found.get_shape()) > 0 and len(found.get_shape()) > 0
    dtype: torch.dtype = (found[:1] if has_rows else tensors.get_tensor(name)).dtype
    return dtype
