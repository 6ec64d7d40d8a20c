"""Model files that are not whole checkpoints, with the tensor names of checkpoints."""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, StateError
from tp_core.internal import Ownership, atomic_part, quantized_parts
from tp_core.plugins import Session
from tp_core.state import (
    StoredTensors,
    TensorInfo,
    collect_state,
    fill_from_whole,
    load_state,
    open_tensors,
    plain_state,
    restore_state,
    whole,
)
from tp_core.tensors import TensorSlice

from tp_trainer._checkpoint._base import read_base
from tp_trainer._checkpoint._folder import verify

# -- Weights in the safetensors format, in one file or several with an index, tensor by tensor -----
# https://github.com/huggingface/safetensors: eight bytes with the header's length, the header as JSON, the
# tensors in little-endian order. The format's own library needs all tensors in memory; here one tensor is.


INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"


def split_over_files(
    state: Mapping[str, Tensor], path: Path, max_file_nbytes: int | None
) -> dict[Path, list[str]]:
    """Return the names of each file's tensors: one file, or several with the names of Hugging Face."""
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
    """Write tensors in the order of their arrival; ``infos`` has their shapes and types, by name."""
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
    """Write weights into the files of :func:`split_over_files`, and an index of several; return the files.

    The index is last. Existing files are replaced at the end. The caller must own ``path``: otherwise the
    files of two processes could be mixed.
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
    with atomic_part(index) as part:
        part.write_text(text)
    path.unlink(missing_ok=True)  # readers would prefer an older single file to the index
    return [*files, index]


# -- reading --------------------------------------------------------------------------------------


def is_weights(path: Path) -> bool:
    """Return whether a path has weights in this format: a file, an index, or a folder with an index."""
    return path.name.endswith((_SUFFIX, INDEX_SUFFIX)) or (path.is_dir() and _index_in(path) is not None)


def _index_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"*{INDEX_SUFFIX}"))), None)


class WeightsFiles(StoredTensors):
    """The tensors of one or several files; a rank reads only its slices."""

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


# -- Model files that are not whole checkpoints, with the tensor names of checkpoints --------------


MODEL = "model."
"""The prefix of a model's tensor names in checkpoints."""


class StateInAFile(StoredTensors):
    """A memory-mapped state with plain names; a rank reads only its slices of each tensor."""

    def __init__(self, path: Path, state: Mapping[str, Tensor]) -> None:
        self.path, self._state = path, state
        self.infos = {MODEL + n: TensorInfo(tuple(t.shape), t.dtype) for n, t in sorted(state.items())}

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        for name, target in targets.items():
            fill_from_whole(target, self._state[name.removeprefix(MODEL)])


class OneOfSeveral(StoredTensors):
    """One model of a checkpoint of several, with the names of a checkpoint of one."""

    def __init__(self, whole: StoredTensors, name: str) -> None:
        self._whole, self._prefix = whole, f"{MODEL}{name}."
        found = {
            n.removeprefix(self._prefix): t for n, t in whole.infos.items() if n.startswith(self._prefix)
        }
        if not found:
            models = {n.removeprefix(MODEL).partition(".")[0] for n in whole.infos if n.startswith(MODEL)}
            msg = f"{whole.path} has no model {name!r}; the names in it begin with {sorted(models)}"
            raise ConfigError(msg)
        self.path, self.infos = whole.path, {MODEL + n: info for n, info in found.items()}

    def fill(self, targets: Mapping[str, Tensor | TensorSlice]) -> None:
        self._whole.fill({self._prefix + n.removeprefix(MODEL): target for n, target in targets.items()})


# -- A model's state in one file, which every backend loads ---------------------------------------


def save_atomically(state: Any, path: str | os.PathLike[str]) -> None:
    """Write ``state`` with ``torch.save``; a crash at any moment leaves the old file unchanged."""
    with atomic_part(path) as part, part.open("wb") as file:
        torch.save(state, file)


def save_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of a prepared model, with the plain model's names; call it on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.

    Collectives: the backend's gathering of the state, one broadcast.
    """
    state: dict[str, Any] = {}
    for name, part in session.state_parts(model).items():
        value = whole(part)  # a collective: on all ranks, though only rank 0 keeps the value
        if session.is_main:
            state[name] = value if value is part else value.cpu()  # a gathered tensor is on the device
    write_on_main(session, path, partial(save_atomically, state, path))


def export_model(
    session: Session, model: nn.Module, path: str | os.PathLike[str], *, max_file_nbytes: int | None
) -> None:
    """Write the weights of a prepared model as safetensors files, tensor by tensor; call it on every rank.

    Raises:
        ConfigError: There are several files, and ``path`` does not end in ".safetensors"; or another process
            writes there; on every rank.
        OSError: A file cannot be written; on every rank.
        StateError: The state holds something that is not a tensor, or of a type that the format lacks; on
            every rank.

    Collectives: the backend's gathering of each tensor, one broadcast.
    """
    write_state(session, session.state_parts(model), Path(path), max_file_nbytes=max_file_nbytes)


def write_state(
    session: Session,
    state: Mapping[str, Any],
    path: Path,
    *,
    read: Callable[[str], Tensor] | None = None,
    then: Callable[[], None] | None = None,
    max_file_nbytes: int | None = None,
) -> None:
    """Write tensors as safetensors files, one after the other; call it on every rank.

    ``state`` has the tensors, or ones of their shapes and types, by their names in the file. ``read`` returns
    the whole tensor of a name, on every rank alike; by default `tp_core.state.whole`. Rank 0 calls ``then``
    at the end. It raises as :func:`export_model` does.

    Collectives: those of ``read``, one broadcast.
    """
    read = read or (lambda name: whole(state[name]))
    for name, value in state.items():
        if not isinstance(value, Tensor):
            msg = (
                f"a safetensors file holds tensors alone, and the model's state has {name!r}, which is "
                f"{type(value).__name__} (get_extra_state?); write it with save_model()"
            )
            raise StateError(msg)
        if quantized_parts(value) is not None:
            msg = f"a safetensors file has no {type(value).__name__}, which {name!r} is: it is quantized"
            raise StateError(msg)
        if type_name(value.dtype) is None:
            msg = f"a safetensors file has no {value.dtype}, which {name!r} is; write it with save_model()"
            raise StateError(msg)
    files = split_over_files(state, path, max_file_nbytes)
    streams = [((name, read(name)) for name in names) for names in files.values()]
    failure: OSError | ConfigError | None = None
    if session.is_main:
        try:
            with Ownership(path.absolute()):
                write_files(path, files, state, streams)
                if then is not None:
                    then()
        except (OSError, ConfigError) as error:
            failure = error
    for tensors in streams:
        for _ in tensors:  # the other ranks, and rank 0 after a failure, must take part in each gather
            pass
    share_failure(session, path, failure)


def write_on_main(session: Session, path: str | os.PathLike[str], write: Callable[[], None]) -> None:
    """Write a file on rank 0; raise on every rank if that fails.

    Collectives: one broadcast.
    """
    failure: OSError | ConfigError | None = None
    if session.is_main:
        try:
            write()
        except (OSError, ConfigError) as error:
            failure = error
    share_failure(session, path, failure)


def share_failure(
    session: Session, path: str | os.PathLike[str], failure: OSError | ConfigError | None
) -> None:
    """Raise on every rank if rank 0 failed.

    Collectives: one broadcast.
    """
    # To every rank: the others must not run on into the next collective, which rank 0 would not join.
    message, is_use = session.broadcast((failure and str(failure), isinstance(failure, ConfigError)))
    if failure is not None:
        raise failure
    if message is not None:
        msg = f"rank 0 could not write {os.fspath(path)}: {message}"
        raise ConfigError(msg) if is_use else OSError(msg)


def load_model(
    session: Session, model: nn.Module, path: str | os.PathLike[str], *, name: str | None = None
) -> None:
    """Load a file of :func:`save_model` or :func:`export_model` into a prepared model; call it on every rank.

    Each rank reads only its slices. A folder is a checkpoint, of a run or of ``tp_shard.save_sharded``, or it
    has an index of weights. ``name`` chooses one of a checkpoint's several models. Where a checkpoint has the
    trained weights alone, the model keeps its own frozen ones, which must be those of the run.

    Raises:
        StateError: The file is damaged, or is of another model; the model is unchanged.

    Collectives: for a checkpoint as in :func:`verify` and `Base.check`.
    """
    if Path(path).is_dir() and not is_weights(Path(path)):
        verify(Path(path), session)
        tensors, base, plain = open_tensors(path), read_base(Path(path)), session.unwrap(model)
        if name is not None:
            tensors = OneOfSeveral(tensors, name)
        if base is not None:
            base = base if name is None else base.of_model(name)
            base.check(session, plain, Path(path))
        without = () if base is None else base.weights
        restore_state(plain, None, tensors, cut=session.as_slice, without=without)
        return
    if name is not None:
        msg = f"{os.fspath(path)} is a file of one model, and name={name!r} is for checkpoints of several"
        raise ConfigError(msg)
    if is_weights(Path(path)):
        stored: StoredTensors = WeightsFiles(Path(path), prefix=MODEL)
    else:
        state = plain_state(load_state(path, mapped=zipfile.is_zipfile(path)))
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(state.get(key), Mapping):
                msg = (
                    f"{os.fspath(path)} has the weights under {key!r}; write them alone, "
                    f"torch.save(torch.load(path)[{key!r}], other), and load that"
                )
                raise StateError(msg)
        if not all(isinstance(value, Tensor) for value in state.values()):
            session.load_model_state(model, state)  # of modules with get_extra_state()
            return
        stored = StateInAFile(Path(path), state)
    plain = session.unwrap(model)
    _check_fits(path, collect_state(plain, None, cut=session.as_slice), stored)
    restore_state(plain, None, stored, cut=session.as_slice)


def _check_fits(
    path: str | os.PathLike[str], expected: Mapping[str, Tensor | TensorSlice], stored: StoredTensors
) -> None:
    found = {name: info.shape for name, info in stored.infos.items()}
    problems = [f"lacks {_plain(name)}" for name in expected.keys() - found.keys()]
    problems += [f"has {_plain(name)}, which the model lacks" for name in found.keys() - expected.keys()]
    problems += [
        f"has {_plain(name)} of shape {found[name]}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name] != tuple(tensor.shape)
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        listed = "; it ".join(sorted(problems)[:3])
        msg = f"{os.fspath(path)} does not fit the model: it {listed}{more}"
        raise StateError(msg)


def _plain(name: str) -> str:
    return name.removeprefix(MODEL)
