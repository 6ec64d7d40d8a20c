"""Checkpoints: what a run is made of, in folders that are whole or not there."""

import os
from dataclasses import dataclass
from typing import Literal

from tp_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where, when and how many checkpoints of a run are kept.

    A checkpoint holds all that the run is made of: model, optimizer, scheduler, loss scaler, position
    in the data, random generators of every rank, metrics. A run that is resumed from it goes on as if
    it had never ended, bit for bit, on the same machine with the same number of ranks.

    Attributes:
        folder: Holds one folder for each checkpoint; all ranks must see it, and one run at a time writes
            there. A relative one is taken from where the process stands when `fit` is called.
        every_steps: Save after so many optimizer steps.
        every_s: Save when the last one is so many seconds old.
        every_epochs: Save after so many epochs; ``None`` for never. The end is always saved.
        keep: How many of the newest are kept; damaged ones do not count.
        best: A metric of validation or training, such as "val_loss" or "accuracy"; the checkpoint
            where it was best is kept beside the newest.
        mode: Whether "min" or "max" of that metric is the best.
        background: Write in a thread, of each rank where the state is split over them: training waits
            only until the state is copied.
        replay: Let a loader that cannot be put at a position read what is before it again.

    Raises:
        ConfigError: A number is out of its range.

    Example:
        >>> checkpoint = Checkpoints("run", every_steps=1000, best="val_loss")
        >>> trainer.fit(
        ...     model, optimizer, loader, step=step, checkpoint=checkpoint, resume="auto"
        ... )  # doctest: +SKIP
    """

    folder: str | os.PathLike[str]
    every_steps: int | None = None
    every_s: float | None = None
    every_epochs: int | None = 1
    keep: int = 3
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    background: bool = False
    replay: bool = False

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_s", "every_epochs", "keep"):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            whole = name != "every_s"
            if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or value <= 0:
                kind = "a whole number from 1" if whole else "a number of seconds above 0"
                msg = f"Checkpoints({name}=...) must be {kind}, got {value!r}"
                raise ConfigError(msg)
        if self.mode not in {"min", "max"}:
            msg = f"Checkpoints(mode=...) must be 'min' or 'max', got {self.mode!r}"
            raise ConfigError(msg)
