"""The arguments of one call of ``fit``, gathered and checked."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks._objects import check_loader
from tp_trainer._checks._values import (
    as_checkpoints,
    check_callable,
    check_positive,
    check_seconds,
)
from tp_trainer._running._loop import Scheduler
from tp_trainer._steps._optimizer_step import GradientRules
from tp_trainer._steps._precision import Step

__all__ = ["FitSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """The arguments of one call of ``fit`` besides the model, its optimizer and what it is trained on.

    Attributes:
        step: The user's step.
        epochs: How often to go through the loader.
        steps_per_epoch: How many batches make an epoch; ``None`` for all that the loader has.
        val_loader: The user's loader of the validation, or ``None``.
        val_step: The step for the validation; ``None`` for the same.
        scheduler: Moves the learning rate, or ``None``.
        scheduler_every: Whether it moves every "step" or every "epoch".
        gradients: What is done with gradients before the optimizer uses them.
        step_timeout_s: How long a step may take; ``None`` for any time.
        save_to: A file that the model's state is written to after every epoch, or ``None``.
        checkpoint: Where and when the state of the run is saved, or ``None``; a folder becomes the settings
            that save there after every epoch.
        resume: "auto", the path of a checkpoint, or ``None``.
        shard: Whether the loaders are split over the data ranks.

    Raises:
        ConfigError: A value is out of its range, or two do not go together.
    """

    step: Step
    epochs: int
    steps_per_epoch: int | None
    val_loader: Iterable[Any] | None
    val_step: Step | None
    scheduler: Scheduler | None
    scheduler_every: str
    gradients: GradientRules
    step_timeout_s: float | None
    save_to: str | os.PathLike[str] | None
    checkpoint: Checkpoints | str | os.PathLike[str] | None
    resume: str | os.PathLike[str] | None
    shard: bool

    def __post_init__(self) -> None:
        check_callable("step", self.step)
        if self.val_loader is not None:
            check_loader("val_loader", self.val_loader)
        if self.val_step is not None:
            check_callable("val_step", self.val_step)
        check_positive("epochs", self.epochs)
        if self.steps_per_epoch is not None:
            check_positive("steps_per_epoch", self.steps_per_epoch)
        check_seconds("step_timeout_s", self.step_timeout_s)
        self.checkpoints()  # which checks

    def checkpoints(self) -> Checkpoints | None:
        """Return where and when the state of the run is saved, or ``None``.

        Raises:
            ConfigError: ``checkpoint`` and ``resume`` are of other types, or do not go together.
        """
        return as_checkpoints(self.checkpoint, self.resume, validates=self.val_loader is not None)

    def resume_from(self) -> Path | str | None:
        """Return the checkpoint to go on from, "auto" for the newest, ``None`` for none."""
        return self.resume if self.resume in (None, "auto") else Path(self.resume)

    def facts(self, steps: int) -> dict[str, object]:
        """Return what all ranks must have been given alike, by its name in messages.

        Args:
            steps: How many batches make an epoch.
        """
        checkpoints = self.checkpoints()
        return {
            "number of epochs": self.epochs,
            "number of steps in an epoch": steps,
            "scheduler_every": self.scheduler_every,
            "clip_norm": self.gradients.clip_norm,
            "clip_value": self.gradients.clip_value,
            "nonfinite": self.gradients.nonfinite,
            "max_skipped": self.gradients.max_skipped,
            "validation": self.val_loader is not None,
            "save_to": self.save_to is not None,
            "checkpoint": None if checkpoints is None else replace(checkpoints, folder=""),
            "resume": self.resume is not None,
        }
