"""What callers give: looked at before anything begins."""

import os
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError

from tp_trainer._checkpoint import Checkpoints

__all__ = ["as_checkpoints", "check_owner", "check_positive", "check_scheduler", "check_seconds"]


def check_positive(what: str, value: object) -> None:
    """Make sure that ``value`` is a whole number from 1.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        msg = f"{what} must be a whole number from 1, got {value!r}"
        raise ConfigError(msg)


def check_seconds(what: str, value: object) -> None:
    """Make sure that ``value`` is ``None`` or a number above 0.

    Raises:
        ConfigError: It is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and value > 0):  # type: ignore[operator]  # it is a number
        msg = f"{what} must be None or a number of seconds above 0, got {value!r}"
        raise ConfigError(msg)


def check_owner(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Make sure that an optimizer has parameters of one of the models.

    Raises:
        ConfigError: It has none.
    """
    mine = {id(p) for model in models for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        msg = (
            "the optimizer has none of the model's parameters, so training would change nothing; "
            "make it from model.parameters()"
        )
        raise ConfigError(msg)


def check_scheduler(scheduler: object, every: str) -> None:
    """Make sure that a scheduler can be moved on, and that it is said when.

    Raises:
        ConfigError: It cannot, or it is not.
    """
    if every not in {"epoch", "step"}:
        msg = f"scheduler_every must be 'epoch' or 'step', got {every!r}"
        raise ConfigError(msg)
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        msg = f"scheduler must have a method step(), got {type(scheduler).__name__}: {scheduler!r}"
        raise ConfigError(msg)


def as_checkpoints(
    checkpoint: Checkpoints | str | os.PathLike[str] | None, resume: object, *, validates: bool
) -> Checkpoints | None:
    """Return where and when to save; a folder alone means after every epoch.

    Args:
        checkpoint: As it was given.
        resume: As it was given.
        validates: Whether there is a validation.

    Raises:
        ConfigError: They are of another type, or do not go together.
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
