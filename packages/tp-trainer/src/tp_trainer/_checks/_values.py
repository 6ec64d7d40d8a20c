"""Options that callers give: checked before anything begins."""

import inspect
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any

from tp_core.errors import ConfigError

from tp_trainer._checkpoint import Checkpoints

__all__ = [
    "as_checkpoints",
    "as_hyperparameters",
    "check_callable",
    "check_limit",
    "check_loss",
    "check_not_negative",
    "check_positive",
    "check_seconds",
    "check_seed",
]


def check_positive(what: str, value: object) -> None:
    """Make sure that ``value`` is a whole number from 1.

    Raises:
        ConfigError: ``value`` is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        msg = f"{what} must be a whole number from 1, got {value!r}"
        raise ConfigError(msg)


def check_not_negative(what: str, value: object) -> None:
    """Make sure that ``value`` is a whole number from 0.

    Raises:
        ConfigError: ``value`` is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = f"{what} must be a whole number from 0, got {value!r}"
        raise ConfigError(msg)


def check_seed(value: object) -> None:
    """Make sure that ``value`` is ``None`` or a whole number from 0.

    Raises:
        ConfigError: ``value`` is something else.
    """
    if value is not None and (not isinstance(value, int) or value < 0):
        msg = f"seed must be None or a whole number from 0, got {value!r}"
        raise ConfigError(msg)


def check_loss(value: object) -> None:
    """Make sure that ``value`` is a kind of loss.

    Raises:
        ConfigError: ``value`` is neither "mean" nor "sum".
    """
    if value not in {"mean", "sum"}:
        msg = f"loss must be 'mean' or 'sum', got {value!r}"
        raise ConfigError(msg)


def check_seconds(what: str, value: object) -> None:
    """Make sure that ``value`` is ``None`` or a number above 0.

    Raises:
        ConfigError: ``value`` is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]  # it is a number
        msg = f"{what} must be None or a number of seconds above 0, got {value!r}"
        raise ConfigError(msg)


def check_limit(what: str, value: object) -> None:
    """Make sure that ``value`` is ``None`` or a number above 0.

    Raises:
        ConfigError: ``value`` is something else.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]  # it is a number
        msg = f"{what} must be None or a number greater than 0, got {value!r}"
        raise ConfigError(msg)


def check_callable(what: str, value: object) -> None:
    """Make sure that ``value`` is a function of the model and a batch.

    Raises:
        ConfigError: ``value`` cannot be called, or not with two arguments.
    """
    wanted = f"{what} must be a function {what}(model, batch) that returns the loss"
    if not callable(value):
        msg = f"{wanted}, got {type(value).__name__}: {value!r}"
        raise ConfigError(msg)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(value, "__name__", type(value).__name__)
        msg = f"{wanted}, and {name}{signature} cannot be called with these two: {error}"
        raise ConfigError(msg) from None


def as_hyperparameters(value: object) -> Mapping[str, Any]:
    """Return what loggers are to know of a run; nothing for ``None``.

    Raises:
        ConfigError: ``value`` is no mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        msg = (
            "hyperparameters must be a mapping, such as vars(arguments) or dataclasses.asdict(config), got "
            f"{type(value).__name__}"
        )
        raise ConfigError(msg)
    return value or {}


def as_checkpoints(
    checkpoint: Checkpoints | str | os.PathLike[str] | None, resume: object, *, validates: bool
) -> Checkpoints | None:
    """Return where and when to save; a folder alone means after every epoch.

    Args:
        checkpoint: As it was given.
        resume: As it was given.
        validates: Whether there is a validation.

    Raises:
        ConfigError: ``checkpoint`` or ``resume`` is of another type, or the two do not go together.
    """
    if isinstance(checkpoint, str | os.PathLike):
        checkpoint = Checkpoints(checkpoint)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        msg = f"checkpoint must be a folder or Checkpoints(folder, ...), got {checkpoint!r}"
        raise ConfigError(msg)
    if resume is not None and not isinstance(resume, str | os.PathLike):
        msg = f"resume must be 'auto' or the path of a checkpoint, got {resume!r}"
        raise ConfigError(msg)
    if resume is not None and checkpoint is None:
        msg = f"resume={resume!r} needs to know where the checkpoints are: checkpoint=folder"
        raise ConfigError(msg)
    if checkpoint is not None and (checkpoint.best or "").startswith("val_") and not validates:
        msg = f"best={checkpoint.best!r} comes from a validation, and there is none: give val_loader"
        raise ConfigError(msg)
    return checkpoint
