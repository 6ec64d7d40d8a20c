"""The arguments of one call of ``fit`` or ``loop``, gathered and checked."""

import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.errors import ConfigError
from tp_core.internal import Progress

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks._objects import check_loader
from tp_trainer._checks._values import as_checkpoints, check_callable, check_seconds
from tp_trainer._metrics._evaluation import named_loaders, without_metrics
from tp_trainer._metrics._metric import Metric
from tp_trainer._running._events import Events
from tp_trainer._running._limits import Limits
from tp_trainer._steps._optimizer_step import GradientRules
from tp_trainer._steps._step import Step
from tp_trainer.loggers._named import LogSpec

__all__ = ["FitSettings", "LoopSettings", "check_state"]


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
    """The arguments of one call of ``loop``, and those of ``fit`` that it has in common with it.

    Attributes:
        limits: How long the run goes on.
        validates: Whether there is a validation.
        step_timeout_s: How long a step may take; ``None`` for any time.
        checkpoint: Where and when the state of the run is saved, or ``None``; a folder becomes the settings
            that save there after every epoch.
        resume: "auto", the path of a checkpoint, or ``None``.
        state: What is saved and restored besides, by name.
        events: Where the callbacks of the run are told what happens.
        log: What the numbers of the run are written to.
        log_every_steps: After how many optimizer steps they are.
        hyperparameters: What loggers are to know of the run, or ``None``.
        accumulate: How many batches make one optimizer step.
        progress: Whether rank 0 shows how far the run is.
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
        """Return the checkpoint to go on from, "auto" for the newest, ``None`` for none."""
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
    """The arguments of one call of ``fit``: those of a loop, and what is done with each batch.

    Attributes:
        step: The user's step.
        val_loader: The user's loader of the validation, several by name, or ``None``.
        metrics: Of the validation, by name.
        monitor: The metric that a scheduler looks at which looks at one; ``None`` for the loss.
        val_step: The step for the validation; ``None`` for the same.
        scheduler: Moves the learning rate, or ``None``.
        scheduler_every: Whether it moves every "step" or every "epoch".
        gradients: What is done with gradients before the optimizer uses them.
        save_to: A file that the model's state is written to after every epoch, or ``None``.
        shard: Whether the loaders are split over the data ranks.

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
