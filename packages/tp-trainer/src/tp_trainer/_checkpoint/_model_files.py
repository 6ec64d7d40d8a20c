"""A model's state in one file, for every backend to load."""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tp_core.errors import ConfigError, StateError
from tp_core.internal import write_atomically
from tp_core.plugins import Session
from tp_core.state import load_state, open_tensors, plain_state, restore_state

from tp_trainer._checkpoint import verify

__all__ = ["check_place", "export_model", "load_model", "save_atomically", "save_model", "write_on_main"]


def save_atomically(state: Any, path: str | os.PathLike[str]) -> None:
    """Write ``state`` with ``torch.save``; a crash at any moment leaves the old file as it was.

    Raises:
        OSError: The folder does not exist, the disk is full, or writing is not allowed.
    """

    def write(part: Path) -> None:
        with part.open("wb") as file:
            torch.save(state, file)

    write_atomically(write, path)


def check_place(session: Session, path: str | os.PathLike[str]) -> None:
    """Make sure, before training costs anything, that a file can be written there.

    Raises:
        ConfigError: ``path`` is not a path.
        OSError: The folder does not exist, or is not to be written to, or ``path`` is itself a folder;
            on every rank.

    Collectives: one broadcast.
    """
    if not isinstance(path, str | os.PathLike):
        msg = f"save_to must be the path of a file, got {type(path).__name__}: {path!r}"
        raise ConfigError(msg)

    def probe() -> None:
        if Path(path).is_dir():
            msg = f"{os.fspath(path)} is a folder; save_to names a file, such as model.pt in it"
            raise IsADirectoryError(msg)
        with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=".probe-"):
            pass

    write_on_main(session, path, probe)


def save_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of a prepared model, with the plain model's names; called on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.

    Collectives: the backend's gathering of the state, one broadcast.
    """
    state = session.model_state(model)
    write_on_main(session, path, partial(save_atomically, state, path))


def export_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a prepared model as a safetensors file; called on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.
        StateError: The state holds something that is not a tensor, or of a type that such files lack; on
            every rank.

    Collectives: the backend's gathering of the state, one broadcast.
    """
    state = session.model_state(model)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if extra:
        msg = (
            f"a safetensors file holds tensors alone, and the model's state has {extra[0]!r}, which is "
            f"{type(state[extra[0]]).__name__} (get_extra_state?); write it with save_model()"
        )
        raise StateError(msg)
    for name, value in state.items():
        if not _is_known_type(value.dtype):
            msg = f"a safetensors file has no {value.dtype}, which {name!r} is; write it with save_model()"
            raise StateError(msg)
    write_on_main(session, path, lambda: write_atomically(partial(_write_weights, state), path))


@cache
def _is_known_type(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=dtype)})
    except KeyError:  # all that the library says of a type that it lacks
        return False
    return True


def _write_weights(state: Mapping[str, Tensor], part: Path) -> None:
    """Write each name with a tensor of its own: tied weights are there under all of their names."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    tensors = {}
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    metadata = {"format": "pt", "torch": torch.__version__, "tp-trainer": version("tp-trainer")}
    try:
        save_file(tensors, part, metadata)
    except SafetensorError as error:  # the library's own word for a full disk
        raise OSError(str(error)) from error


def write_on_main(session: Session, path: str | os.PathLike[str], write: Callable[[], None]) -> None:
    """Write a file on rank 0, and raise on every rank if that fails.

    Collectives: one broadcast.
    """
    failure = None
    if session.is_main:
        try:
            write()
        except OSError as error:
            failure = error
    # Every rank learns how it went: the others must not run on into the next collective.
    message = session.broadcast(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if message is not None:
        msg = f"rank 0 could not write {os.fspath(path)}: {message}"
        raise OSError(msg)


def _check_whole(session: Session, folder: Path) -> None:
    """Make sure that the checkpoint of a run is what was written.

    Raises:
        StateError: The checkpoint is not what was written; on every rank.

    Collectives: one broadcast.
    """
    failure = None
    # A folder of tp_shard.save_sharded has an index of tensors, and no manifest.
    if session.is_main and not (folder / ".metadata").is_file():
        try:
            verify(folder)
        except StateError as error:
            failure = str(error)
    failure = session.broadcast(failure)
    if failure is not None:
        raise StateError(failure)


def load_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load what :func:`save_model` wrote into a prepared model; called on every rank.

    A folder is a checkpoint, of a run or of ``tp_shard.save_sharded``: the model in it is loaded.

    Raises:
        FileNotFoundError: The file does not exist.
        StateError: The file is damaged, or is of another model; the model is untouched.
    """
    if Path(path).is_dir():
        _check_whole(session, Path(path))
        restore_state(session.unwrap(model), None, open_tensors(path), cut=session.as_slice)
        return
    state = plain_state(load_state(path))
    expected = session.model_state(model)
    problems = [f"lacks {name}" for name in expected.keys() - state.keys()]
    problems += [f"has {name}, which the model lacks" for name in state.keys() - expected.keys()]
    problems += [
        f"has {name} of shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        listed = "; it ".join(sorted(problems)[:3])
        msg = f"{os.fspath(path)} does not fit the model: it {listed}{more}"
        raise StateError(msg)
    session.load_model_state(model, state)
