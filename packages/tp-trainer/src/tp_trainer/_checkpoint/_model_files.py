"""Model files that are not whole checkpoints, with the tensor names of checkpoints."""

import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, StateError
from tp_core.files import Ownership, atomic_part
from tp_core.plugins import Session
from tp_core.sessions import agree_on_failure
from tp_core.state import (
    SafetensorsFiles,
    StoredTensors,
    TensorInfo,
    collect_state,
    fill_from_whole,
    is_safetensors,
    load_state,
    open_tensors,
    plain_state,
    restore_state,
    safetensors_dtype,
    split_over_files,
    whole,
    write_safetensors,
)
from tp_core.tensors import TensorSlice, quantized_parts

from tp_trainer._checkpoint._base import read_base
from tp_trainer._checkpoint._folder import verify

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
        own = {n.removeprefix(self._prefix): t for n, t in whole.infos.items() if n.startswith(self._prefix)}
        if not own:
            models = {n.removeprefix(MODEL).partition(".")[0] for n in whole.infos if n.startswith(MODEL)}
            msg = f"{whole.path} has no model {name!r}; the names in it begin with {sorted(models)}"
            raise ConfigError(msg)
        self.path, self.infos = whole.path, {MODEL + n: info for n, info in own.items()}

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

    Collectives: the backend's gathering of the state, one all-gather of objects.
    """
    state: dict[str, Any] = {}
    for name, part in session.state_parts(model).items():
        value = whole(part)  # a collective: on all ranks, though only rank 0 keeps the value
        if session.is_main:
            # a gathered tensor is on the device
            if value is part:
                state[name] = value
            else:
                state[name] = value.cpu()
    write_on_main(session, path, partial(save_atomically, state, path))


def export_model(session: Session, model: nn.Module, path: Path, *, max_file_nbytes: int | None) -> None:
    """Write the weights of a prepared model as safetensors files, tensor by tensor; call it on every rank.

    Raises:
        ConfigError: Another process writes there; on every rank.
        OSError: A file cannot be written; on every rank.
        StateError: The state holds something that is not a tensor, or of a type that the format lacks; on
            every rank.

    Collectives: the backend's gathering of each tensor, one all-gather of objects.
    """
    write_state(session, session.state_parts(model), path, max_file_nbytes=max_file_nbytes)


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
    the whole tensor of a name, on every rank; by default `tp_core.state.whole`. Rank 0 calls ``then``
    at the end. It raises as :func:`export_model` does.

    Collectives: those of ``read``, one all-gather of objects.
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
        if safetensors_dtype(value.dtype) is None:
            msg = f"a safetensors file has no {value.dtype}, which {name!r} is; write it with save_model()"
            raise StateError(msg)
    infos = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in state.items()}
    files = split_over_files(infos, path, max_file_nbytes)
    streams = [((name, read(name)) for name in names) for names in files.values()]
    failure: OSError | ConfigError | None = None
    if session.is_main:
        try:
            with Ownership(path.absolute()):
                write_safetensors(path, files, infos, streams)
                if then is not None:
                    then()
        except (OSError, ConfigError) as error:
            failure = error
    for tensors in streams:
        for _ in tensors:  # the other ranks, and rank 0 after a failure, must take part in each gather
            pass
    agree_on_failure(failure, session.gather_objects, f"write {os.fspath(path)}")


def write_on_main(session: Session, path: str | os.PathLike[str], write: Callable[[], None]) -> None:
    """Write a file on rank 0; raise on every rank if that fails.

    Collectives: one all-gather of objects.
    """
    failure: OSError | ConfigError | None = None
    if session.is_main:
        try:
            write()
        except (OSError, ConfigError) as error:
            failure = error
    agree_on_failure(failure, session.gather_objects, f"write {os.fspath(path)}")


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
    if Path(path).is_dir() and not is_safetensors(Path(path)):
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
    if is_safetensors(Path(path)):
        stored: StoredTensors = SafetensorsFiles(Path(path), prefix=MODEL)
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
    shapes = {name: info.shape for name, info in stored.infos.items()}
    problems = [f"lacks {_plain(name)}" for name in expected.keys() - shapes.keys()]
    problems += [f"has {_plain(name)}, which the model lacks" for name in shapes.keys() - expected.keys()]
    problems += [
        f"has {_plain(name)} of shape {shapes[name]}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    if problems:
        if len(problems) > 3:
            more = f" (and {len(problems) - 3} more)"
        else:
            more = ""
        listed = "; it ".join(sorted(problems)[:3])
        msg = f"{os.fspath(path)} does not fit the model: it {listed}{more}"
        raise StateError(msg)


def _plain(name: str) -> str:
    return name.removeprefix(MODEL)
