"""The arguments of one call of ``fit`` or ``loop``, gathered and checked, and the limits of a run."""

import os
import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.errors import ConfigError
from tp_core.internal import Progress

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks import (
    as_checkpoints,
    check_callable,
    check_loader,
    check_not_negative,
    check_positive,
    check_seconds,
)
from tp_trainer._metrics._evaluation import named_loaders, without_metrics
from tp_trainer._metrics._metric import Metric
from tp_trainer._running._callbacks import Events
from tp_trainer._steps._optimizer_step import GradientRules
from tp_trainer._steps._step import Step
from tp_trainer.loggers._named import LogSpec

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([dhms])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a run, and the times of its validations.

    Attributes:
        epochs: The number of passes through the loader. ``None`` trains until another limit ends the run;
            without any other limit it is 1.
        steps_per_epoch: The number of batches in an epoch; ``None`` for all batches of the loader.
        max_steps: The total number of optimizer steps, those before a resume included.
        max_time: How long this call trains: seconds, or text such as "1h30m".
        val_every_steps: Validate after every so many optimizer steps, and at the ends of epochs.
        sanity_val_batches: How many batches to validate on before the first step.
        overfit_batches: Train on the first so many batches alone, the same in every epoch.
        restart_stream: Whether every epoch restarts a stream, instead of continuing it.

    Raises:
        ConfigError: A value is out of its range.
    """

    epochs: int | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    max_time: float | str | None = None
    val_every_steps: int | None = None
    sanity_val_batches: int = 0
    overfit_batches: int | None = None
    restart_stream: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "steps_per_epoch", "max_steps", "val_every_steps", "overfit_batches"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)
        check_not_negative("sanity_val_batches", self.sanity_val_batches)
        if self.max_time is not None:
            seconds_of(self.max_time)
        if self.epochs is None and self.max_steps is None and self.max_time is None:
            object.__setattr__(self, "epochs", 1)  # plain assignment fails in a frozen dataclass

    @property
    def max_seconds(self) -> float | None:
        """The seconds that this call may train; ``None`` for any time."""
        return None if self.max_time is None else seconds_of(self.max_time)


def seconds_of(time: object) -> float:
    """Return a time in seconds.

    Args:
        time: A number of seconds, or text: "90s", "1h30m", "2d", "01:30:00".

    Raises:
        ConfigError: ``time`` is something else, or not above 0.

    Example:
        >>> seconds_of("1h30m"), seconds_of("00:01:30"), seconds_of(5)
        (5400.0, 90.0, 5.0)
    """
    seconds = _parsed(time) if isinstance(time, str) else time
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        msg = (
            "max_time must be a number of seconds above 0, or text such as '1h30m' or '01:30:00', got "
            f"{time!r}"
        )
        raise ConfigError(msg)
    return float(seconds)


def _parsed(text: str) -> float | None:
    if re.fullmatch(r"\d+:\d\d:\d\d", text):
        hours, minutes, seconds = map(int, text.split(":"))
        return hours * 3600.0 + minutes * 60.0 + seconds
    found = _TIME.findall(text)
    if not found or _TIME.sub("", text).strip():
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in found)


def check_state(state: object) -> dict[str, Any]:
    """Return the dict that was given as ``state=``, an empty one for ``None``.

    Raises:
        ConfigError: ``state`` is not a dict, or has names that are not identifiers.
    """
    if state is None:
        return {}
    if not isinstance(state, dict):
        got = f"{type(state).__name__}: {state!r:.100}"
        msg = f"state must be a dict of what is to be saved, by name, got {got}"
        raise ConfigError(msg)
    for name in state:
        if not isinstance(name, str) or not name.isidentifier():
            msg = f"the names in state= must be words such as 'ema', got {name!r}"
            raise ConfigError(msg)
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The arguments of one call of ``loop``, which are also arguments of ``fit``.

    Attributes:
        limits: The limits of the run.
        validates: Whether there is a validation.
        step_timeout_s: How long a step may take; ``None`` for any time.
        checkpoint: Where and when to save the run, or ``None``. A folder alone saves after every epoch.
        resume: "auto", the path of a checkpoint, or ``None``.
        state: Further objects to save and restore, by name.
        events: Sends events to the run's callbacks.
        log: The loggers, or their names.
        log_every_steps: How many optimizer steps lie between two writes to the loggers.
        hyperparameters: Values for the loggers, or ``None``.
        accumulate: The number of batches in one optimizer step.
        progress: Whether rank 0 shows progress.
        backend: The name of the backend.

    Raises:
        ConfigError: A value is out of its range, or two do not go together.
    """

    limits: Limits
    validates: bool
    step_timeout_s: float | None
    checkpoint: Checkpoints | str | os.PathLike[str] | None
    resume: str | os.PathLike[str] | None
    state: dict[str, Any]
    events: Events
    log: LogSpec
    log_every_steps: int
    hyperparameters: Mapping[str, Any] | None
    accumulate: int
    progress: Progress
    backend: str = ""

    def __post_init__(self) -> None:
        check_seconds("step_timeout_s", self.step_timeout_s)
        limits = self.limits
        if not self.validates and (limits.val_every_steps is not None or limits.sanity_val_batches):
            name = "val_every_steps" if limits.val_every_steps is not None else "sanity_val_batches"
            msg = (
                f"{name} needs a validation, and there is none: give val_loader to fit(), or validate to "
                "loop()"
            )
            raise ConfigError(msg)
        self.checkpoints()  # which checks

    def checkpoints(self) -> Checkpoints | None:
        """Return where and when the state of the run is saved, or ``None``.

        Raises:
            ConfigError: ``checkpoint`` and ``resume`` are of other types, or do not go together.
        """
        return as_checkpoints(self.checkpoint, self.resume, validates=self.validates)

    def resume_from(self) -> Path | str | None:
        """Return the checkpoint to resume from, "auto" for the newest, ``None`` for none."""
        return self.resume if self.resume in (None, "auto") else Path(self.resume)

    def facts(self, steps: int) -> dict[str, object]:
        """Return what all ranks must have been given alike, by its name in messages.

        Args:
            steps: How many batches make an epoch.
        """
        checkpoints, limits = self.checkpoints(), self.limits
        return {
            "number of epochs": limits.epochs,
            "number of steps in an epoch": steps,
            "max_steps": limits.max_steps,
            "max_time": limits.max_seconds,
            "val_every_steps": limits.val_every_steps,
            "sanity_val_batches": limits.sanity_val_batches,
            "step_timeout_s": self.step_timeout_s,
            "validation": self.validates,
            "checkpoint": None if checkpoints is None else replace(checkpoints, folder=""),
            "checkpoints' folder": None if checkpoints is None else os.fspath(checkpoints.folder),
            "resume": None if self.resume is None else os.fspath(self.resume),
            "callbacks": sorted(self.events.states()),
            "log_every_steps": self.log_every_steps,
            "state": sorted(self.state),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings(LoopSettings):
    """The arguments of one call of ``fit``: a loop's, and the step, the validation and the optimization.

    Attributes:
        step: The user's step.
        val_loader: The user's validation loader, a dict of several, or ``None``.
        metrics: The metrics of the validation, by name.
        monitor: The metric for a scheduler such as ``ReduceLROnPlateau``; ``None`` for the loss.
        val_step: The step for the validation; ``None`` for the same step.
        scheduler: The learning-rate scheduler, or ``None``.
        scheduler_every: Whether to step it every "step" or every "epoch".
        gradients: Clipping, and the treatment of NaN.
        save_to: A file to write the model's state to after every epoch, or ``None``.
        shard: Whether to split the loaders over the data ranks.

    Raises:
        ConfigError: A value is out of its range, or two do not go together.
    """

    step: Step
    val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None
    metrics: Mapping[str, Metric]
    monitor: str | None
    val_step: Step | None
    scheduler: Any
    scheduler_every: str
    gradients: GradientRules
    save_to: str | os.PathLike[str] | None
    shard: bool

    def __post_init__(self) -> None:
        LoopSettings.__post_init__(self)
        check_callable("step", self.step)
        for loader in self.val_loaders().values():
            check_loader("val_loader", loader)
            if _has_no_batch(loader):
                msg = "there is nothing to validate on: val_loader has no batch; leave it out, or give data"
                raise ConfigError(msg)
        if self.metrics and self.val_loader is None:
            msg = "metrics= are those of a validation, and there is none: give val_loader"
            raise ConfigError(msg)
        if self.monitor is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            msg = f"monitor={self.monitor!r} is what ReduceLROnPlateau looks at, and the scheduler is none"
            raise ConfigError(msg)
        if self.val_step is not None:
            check_callable("val_step", self.val_step)
            if self.val_loader is None:
                msg = "val_step is for a validation, and there is none: give val_loader"
                raise ConfigError(msg)

    def val_loaders(self) -> dict[str, Iterable[Any]]:
        """Return the user's loaders of the validation by what their results' names begin with.

        Raises:
            ConfigError: A name cannot be used.
        """
        return {} if self.val_loader is None else named_loaders("val_loader", self.val_loader)

    def training_step(self) -> Step:
        """Return the step to train with, without what it returns for the metrics of the validation."""
        return without_metrics(self.step, self.metrics)

    def facts(self, steps: int) -> dict[str, object]:
        """Return what all ranks must have been given alike, by its name in messages.

        Args:
            steps: How many batches make an epoch.
        """
        return LoopSettings.facts(self, steps) | {
            "validation's loaders": list(self.val_loaders()),
            "metrics": list(self.metrics),
            "monitor": self.monitor,
            "scheduler_every": self.scheduler_every,
            "clip_norm": self.gradients.clip_norm,
            "clip_value": self.gradients.clip_value,
            "nonfinite": self.gradients.nonfinite,
            "max_skipped": self.gradients.max_skipped,
            "save_to": None if self.save_to is None else os.fspath(self.save_to),
        }


def _has_no_batch(loader: Iterable[Any]) -> bool:
    try:
        return isinstance(loader, Sized) and not len(loader)
    except TypeError:  # a DataLoader over an iterable dataset without length
        return False
