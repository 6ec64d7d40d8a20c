"""Checkpoints: the whole state of a run, in folders that exist completely or not at all."""

import os
import re
from dataclasses import dataclass
from typing import Literal

from tp_core.errors import ConfigError

from tp_trainer._peer_names import explain_fields


# No slots: `tp train` takes it as a parameter's default, of which jsonargparse reads `vars()`.
@explain_fields
@dataclass(frozen=True)
class Checkpoints:
    """The folder, the times and the number of a run's checkpoints.

    A checkpoint holds the whole state of the run: model, optimizer, scheduler, loss scaler, position in the
    data, random generators of every rank, metrics. A resumed run continues bit for bit as if it had never
    stopped, on the same machine with the same number of ranks.

    Attributes:
        folder: Holds one folder for each checkpoint. All ranks must see it, and one run at a time writes
            there. A relative path starts at the working folder of the call of `fit`.
        every_steps: Save every this many optimizer steps.
        every_s: Save when the last checkpoint is this many seconds old.
        every_epochs: Save every this many epochs; ``None`` for never. The end is always saved.
        keep: How many of the newest checkpoints to keep; damaged ones do not count.
        best: A metric of validation or training, such as "val_loss" or "accuracy". The checkpoint with its
            best value is kept beside the newest.
        mode: Whether "min" or "max" of that metric is the best. ``None`` is "min", and an error where
            the name says that more is better, as for an accuracy.
        background: Write in a thread; if the state is sharded, in a thread of each rank. Training waits
            only until the state is copied.
        replay: Let a loader without positions read the batches before the checkpoint's position again.
        weights: Which weights of the model a checkpoint has: "all", or the "trainable" ones. The latter
            leaves out the frozen base of adapters, and keeps its digests: to resume, build the model from the
            same base. Buffers are saved, and frozen weights that the run writes (a momentum encoder).

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
    mode: Literal["min", "max"] | None = None
    background: bool = False
    replay: bool = False
    weights: Literal["all", "trainable"] = "all"

    def __post_init__(self) -> None:
        check_folder("Checkpoints(folder)", self.folder)
        for name in ("every_steps", "every_s", "every_epochs", "keep"):
            value = getattr(self, name)
            if value is None and name != "keep":
                continue
            whole = name != "every_s"
            kinds = (int,) if whole else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
                if whole:
                    kind = "a whole number from 1"
                else:
                    kind = "a number of seconds above 0"
                msg = f"Checkpoints({name}=...) must be {kind}, got {value!r}"
                raise ConfigError(msg)
        if self.weights not in {"all", "trainable"}:
            msg = f"Checkpoints(weights=...) must be 'all' or 'trainable', got {self.weights!r}"
            raise ConfigError(msg)
        if self.best is not None and not isinstance(self.best, str):
            msg = f"Checkpoints(best=...) must be the name of a metric, as 'val_loss', got {self.best!r}"
            raise ConfigError(msg)
        check_mode("Checkpoints", self.best, self.mode)


# Words in the names of metrics of which more is better.
_GROWING = {
    *("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "map", "precision", "psnr"),
    *("recall", "reward", "rouge"),
}


def check_mode(call: str, metric: str | None, mode: str | None) -> None:
    """Check which value of a metric is the best: without a mode it is the smallest.

    Raises:
        ConfigError: There is no such mode; or none is given, and more of the metric seems to be better.
    """
    if mode not in {"min", "max", None}:
        msg = f"{call}(mode=...) must be 'min' or 'max', got {mode!r}"
        raise ConfigError(msg)
    if mode is None and metric is not None and _GROWING & set(re.split(r"[^a-z0-9]+", metric.lower())):
        msg = f"{call}() takes the smallest {metric!r} for the best; write mode='max', or mode='min' if it is"
        raise ConfigError(msg)


# A field of a format, such as "{epoch}" or "{loss:.2f}".
_FIELD = re.compile(r"\{[A-Za-z_]\w*(?::[^{}/]*)?\}[^/]*/?$")


def check_folder(call: str, folder: object) -> None:
    """Check the name of a folder that will be made: a slip in it would leave one that nobody finds.

    Raises:
        ConfigError: It is no path, is empty, or has what a shell or a format would have replaced.
    """
    if not isinstance(folder, str | os.PathLike):
        msg = f"{call} must be the path of a folder, got {folder!r}"
        raise ConfigError(msg)
    path = os.fspath(folder)
    name = os.fsdecode(path)
    hint = None
    if not name:
        hint = "it is empty; for the working folder write '.'"
    elif name.startswith("~"):
        hint = "Python leaves ~ as it is; write os.path.expanduser(...)"
    elif _FIELD.search(name):
        hint = "nothing fills in the braces, and each checkpoint has its step in its own name; write the name"
    if hint is not None:
        msg = f"{call} is {name!r}: {hint}"
        raise ConfigError(msg)
