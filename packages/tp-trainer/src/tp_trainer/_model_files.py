"""A model's state in one file, for every backend to load."""

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn
from tp_core import Session
from tp_core.errors import StateError

from tp_trainer._files import load_state, save_atomically, write_atomically

__all__ = ["export_model", "load_model", "save_model"]


def save_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of a prepared model, with the plain model's names; called on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.

    Collectives: the backend's gathering of the state, one broadcast.
    """
    state = session.model_state(model)
    _write_on_main(session, path, partial(save_atomically, state, path))


def export_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a prepared model as a safetensors file; called on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.
        StateError: The state holds something that is no tensor, or of a type that such files lack; on
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
    _write_on_main(session, path, lambda: write_atomically(partial(_write_weights, state), path))


@cache
def _is_known_type(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except KeyError:  # all that the library says of a type that it lacks
        return False
    return True


def _write_weights(state: Mapping[str, Tensor], part: Path) -> None:
    """Write each name with a tensor of its own: tied weights are there under all of their names."""
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


def _write_on_main(session: Session, path: str | os.PathLike[str], write: Callable[[], None]) -> None:
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


def load_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load what :func:`save_model` wrote into a prepared model; called on every rank.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: The file is damaged, or is of another model; the model is untouched.
    """
    state = load_state(path)
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
