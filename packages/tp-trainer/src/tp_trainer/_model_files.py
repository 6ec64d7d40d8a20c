"""A model's state in one file, for every backend to load."""

import os

from torch import nn
from tp_core import Session
from tp_core.errors import StateError

from tp_trainer._files import load_state, save_atomically

__all__ = ["load_model", "save_model"]


def save_model(session: Session, model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of a prepared model, with the plain model's names; called on every rank.

    Raises:
        OSError: The file cannot be written; on every rank.

    Collectives: the backend's gathering of the state, one broadcast.
    """
    state = session.model_state(model)
    failure = None
    if session.is_main:
        try:
            save_atomically(state, path)
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
