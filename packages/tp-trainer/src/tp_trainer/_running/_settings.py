"""The objects that `fit` and `loop` take, their shortcuts, and the settings of one call."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError, LoaderError
from tp_core.output import Progress

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks import (
    check_callable,
    check_limit,
    check_loader,
    check_not_negative,
    check_positive,
    check_scheduler,
)
from tp_trainer._metrics import Metric, check_metrics, named_loaders
from tp_trainer._peer_names import explain_fields
from tp_trainer._running._callbacks import Events
from tp_trainer._steps._optimizer_step import GradientRules
from tp_trainer._steps._step import Step
from tp_trainer.loggers._named import LogSpec

Options = TypeVar("Options", "Limits", GradientRules)

# -- The objects of a call ------------------------------------------------------------------------


class Scheduler(Protocol):
    """A learning-rate scheduler: the one method that the loop needs."""

    def step(self) -> None:
        """Set the next learning rate."""


# No slots: `tp train` takes it as a parameter's default, of which jsonargparse reads `vars()`.
@explain_fields
@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a run, of its epochs and of a step.

    Whichever of the first three comes first ends the run. Without any of them it has one epoch.

    Attributes:
        epochs: The number of passes through the loader.
        max_steps: The total number of optimizer steps, those before a resume included. A step is as many
            batches as the trainer accumulates.
        max_time: How long this call trains: seconds, or text such as "1h30m".
        steps_per_epoch: The number of batches in an epoch; needed for a loader without length.
        overfit_batches: Train on the first this many batches alone, the same in every epoch.
        restart_stream: Whether every epoch restarts a stream (iterable data); else it continues the stream.
        step_timeout_s: After a step of this many seconds every rank writes its Python stack to stderr, and
            the job ends with status 124. Waiting for a batch counts; writing a checkpoint does not. The first
            step may have to compile.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> limits = Limits(max_time="1h30m", steps_per_epoch=1000)
        >>> trainer.fit(model, optimizer, loader, step=step, limits=limits)  # doctest: +SKIP
    """

    epochs: int | None = None
    max_steps: int | None = None
    max_time: float | str | None = None
    steps_per_epoch: int | None = None
    overfit_batches: int | None = None
    restart_stream: bool = False
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "steps_per_epoch", "overfit_batches"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)
        if self.max_time is not None:
            seconds_of(self.max_time)
        check_limit("step_timeout_s", self.step_timeout_s, "a number of seconds above 0")


@explain_fields
@dataclass(frozen=True, slots=True)
class Validation:
    """The validation of a run, after every epoch and at the times given here.

    Attributes:
        source: A loader, or a dict of loaders, with results named "name/...". For `Trainer.loop` it is a
            function that returns the results by name, as `Trainer.evaluate` does.
        step: The step for the validation; by default the step of the training.
        metrics: Metrics of the whole validation set, as for `Trainer.evaluate`; scalar results are among the
            validation's. In training, the step's values under their names are ignored.
        every_steps: Validate every this many optimizer steps, too.
        sanity_batches: How many batches to validate on before the first step. Above 0, a function is called
            once.

    Raises:
        ConfigError: A value cannot be used.

    Example:
        >>> validation = Validation(loader, every_steps=500, sanity_batches=2)
        >>> trainer.fit(model, optimizer, data, step=step, validation=validation)  # doctest: +SKIP
    """

    source: Iterable[Any] | Mapping[str, Iterable[Any]] | Callable[[], Mapping[str, float]]
    _: KW_ONLY
    step: Step | None = None
    metrics: Mapping[str, Metric] | None = None
    every_steps: int | None = None
    sanity_batches: int = 0

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            check_positive("Validation(every_steps=...)", self.every_steps)
        check_not_negative("Validation(sanity_batches=...)", self.sanity_batches)
        check_metrics(self.metrics)
        if self.step is not None:
            check_callable("step", self.step)
        if not isinstance(self.source, Iterable | nn.Module) and callable(self.source):
            if self.step is not None or self.metrics:
                msg = "Validation(step=..., metrics=...) go with a loader; a function makes its own results"
                raise ConfigError(msg)
            return
        for loader in named_loaders("validation", self.source).values():
            check_loader("validation", loader)
            if _has_no_batch(loader):
                msg = "there is nothing to validate on: validation has no batch; leave it out, or give data"
                raise ConfigError(msg)


@explain_fields
@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """A learning-rate scheduler, and when it is stepped.

    Attributes:
        scheduler: The scheduler.
        every: Whether to step it every "epoch" or every optimizer "step".
        monitor: The metric for ``ReduceLROnPlateau``: "val_f1", "loss" and so on; by default the validation
            loss, or without a validation the training loss.

    Raises:
        ConfigError: A value cannot be used.

    Example:
        >>> warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=500)
        >>> scheduler = SchedulerOptions(warmup, every="step")
    """

    scheduler: Scheduler
    _: KW_ONLY
    every: Literal["epoch", "step"] = "epoch"
    monitor: str | None = None

    def __post_init__(self) -> None:
        check_scheduler(self.scheduler)
        if self.every not in {"epoch", "step"}:
            msg = f"SchedulerOptions(every=...) must be 'epoch' or 'step', got {self.every!r}"
            raise ConfigError(msg)
        by_metric = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.monitor is not None and not by_metric:
            msg = f"monitor={self.monitor!r} is what ReduceLROnPlateau looks at, and the scheduler is none"
            raise ConfigError(msg)
        if by_metric and self.every == "step":
            msg = "ReduceLROnPlateau looks at a metric of an epoch, so it is stepped with every='epoch'"
            raise ConfigError(msg)


@explain_fields
@dataclass(frozen=True)  # no slots, as `Limits`
class LogOptions:
    """The loggers of a run, and what they get.

    Attributes:
        loggers: Loggers of :mod:`tp_trainer.loggers`, or names of installed ones: "csv", "jsonl",
            "tensorboard", "wandb", "mlflow".
        every_steps: How many optimizer steps lie between two rows of the log; callbacks' tensors are read
            from the device at these steps.
        hyperparameters: Further values for the loggers, beside the trainer's own.

    Raises:
        ConfigError: A value cannot be used.

    Example:
        >>> log = LogOptions(["csv", "tensorboard"], every_steps=10, hyperparameters={"width": 64})
    """

    loggers: LogSpec
    _: KW_ONLY
    every_steps: int = 50
    hyperparameters: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_positive("LogOptions(every_steps=...)", self.every_steps)
        if self.hyperparameters is not None and not isinstance(self.hyperparameters, Mapping):
            msg = (
                "hyperparameters must be a mapping, such as vars(arguments) or dataclasses.asdict(config), "
                f"got {type(self.hyperparameters).__name__}"
            )
            raise ConfigError(msg)


def _has_no_batch(loader: Iterable[Any]) -> bool:
    try:
        return isinstance(loader, Sized) and not len(loader)
    except TypeError:  # a DataLoader over an iterable dataset without length
        return False


_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_TIME = re.compile(r"(?<!\d)(\d++(?:\.\d++)?+)\s*+([dhms])")  # no part gives back: a text may be long


def seconds_of(time: object) -> float:
    """Return a time in seconds, from a number or text: "90s", "1h30m", "2d", "01:30:00".

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
    parts = _TIME.findall(text)
    if not parts or _TIME.sub("", text).strip():
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


# -- The settings of a call: its objects, with the shortcuts in them ------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The settings of one call of ``loop``, which ``fit`` has too."""

    limits: Limits
    validation: Validation | None
    checkpoint: Checkpoints | None
    resume: str | os.PathLike[str] | None
    events: Events
    log: LogOptions
    state: dict[str, Any]
    progress: Progress
    backend: str = ""
    choice: str = ""

    def facts(self, steps: int) -> dict[str, object]:
        """Return what all ranks must have been given equal, by its name in messages."""
        validation, checkpoint = self.validation, self.checkpoint
        return {
            **asdict(self.limits),
            "number of steps in an epoch": steps,
            "validation": validation is not None,
            "validation's every_steps": validation and validation.every_steps,
            "validation's sanity_batches": validation and validation.sanity_batches,
            "checkpoint": None if checkpoint is None else replace(checkpoint, folder="."),
            "checkpoints' folder": None if checkpoint is None else os.fspath(checkpoint.folder),
            "resume": None if self.resume is None else os.fspath(self.resume),
            "callbacks": sorted(self.events.states()),
            "log's every_steps": self.log.every_steps,
            "state": sorted(self.state),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """The settings of one call of ``fit``: a loop's, and those of the steps that it makes."""

    loop: LoopSettings
    train_loader: Iterable[Any]
    step: Step
    scheduler: SchedulerOptions | None
    gradients: GradientRules

    def __post_init__(self) -> None:
        check_loader("train_loader", self.train_loader)
        check_callable("step", self.step)
        for loader in self.val_loaders().values():
            check_loader("validation", loader)  # a function, which is for a loop, is none

    def val_step(self) -> Step:
        """Return the step of the validation: its own, or the one of the training."""
        validation = self.loop.validation
        if validation is None or validation.step is None:
            return self.step
        return validation.step

    def val_loaders(self) -> dict[str, Iterable[Any]]:
        validation = self.loop.validation
        if validation is None:
            return {}
        return named_loaders("validation", validation.source)

    def val_metrics(self) -> dict[str, Metric]:
        if self.loop.validation is None:
            return {}
        return check_metrics(self.loop.validation.metrics)

    def facts(self) -> dict[str, object]:
        scheduler = self.scheduler
        return {
            **asdict(self.gradients),
            "validation's loaders": list(self.val_loaders()),
            "metrics": list(self.val_metrics()),
            "scheduler": None if scheduler is None else (scheduler.every, scheduler.monitor),
        }


def with_shortcuts(name: str, given: Options | None, kind: type[Options], **shortcuts: Any) -> Options:
    """Return options with the values of their shortcuts, which ``fit`` takes as arguments beside them."""
    if given is not None and not isinstance(given, kind):
        msg = f"{name} must be {kind.__name__}(...), got {type(given).__name__}: {given!r:.80}"
        raise ConfigError(msg)
    options = kind() if given is None else given
    for field, value in shortcuts.items():
        inside = getattr(options, field)
        if value is not None and inside is not None:
            msg = f"{field}={value!r} and {name}={kind.__name__}({field}={inside!r}) are given; give one"
            raise ConfigError(msg)
    return replace(options, **{field: value for field, value in shortcuts.items() if value is not None})


def limits_of(given: Limits | None, *, epochs: int | None, max_steps: int | None) -> Limits:
    """Return the limits of a run, of one epoch if nothing else ends it."""
    limits = with_shortcuts("limits", given, Limits, epochs=epochs, max_steps=max_steps)
    ends = (limits.epochs, limits.max_steps, limits.max_time)
    if ends == (None, None, None):
        return replace(limits, epochs=1)
    return limits


def from_environment(
    limits: Limits,
    checkpoint: Checkpoints | str | os.PathLike[str] | None,
    resume: str | os.PathLike[str] | None,
) -> tuple[Limits, Checkpoints | str | os.PathLike[str] | None, str | os.PathLike[str] | None]:
    """Return the arguments of a run as ``TP_MAX_STEPS`` and ``TP_CHECKPOINT`` change them, for trials."""
    most, folder = os.environ.get("TP_MAX_STEPS"), os.environ.get("TP_CHECKPOINT")
    if most:
        if not most.isdecimal() or not int(most):
            msg = f"the variable TP_MAX_STEPS has to be a number of steps above zero, got {most!r}"
            raise ConfigError(msg)
        limits = replace(limits, max_steps=int(most))
    if folder:
        if isinstance(checkpoint, Checkpoints):
            checkpoint = replace(checkpoint, folder=folder)
        else:
            checkpoint = folder
        resume = "auto"
    return limits, checkpoint, resume


def check_state(state: object) -> dict[str, Any]:
    """Return the dict that was given as ``state=``, an empty one for ``None``."""
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


def batches_per_epoch(train: PreparedLoader, limits: Limits) -> int:
    """Return the number of batches in an epoch, by the loader's length and the run's limits.

    Raises:
        ConfigError: The loader is empty.
        LoaderError: It has no length, or fewer batches than were asked for.
    """
    wanted = limits.steps_per_epoch
    try:
        has = len(train)
    except LoaderError:
        if wanted is None:
            raise
        has = wanted
    if has == 0:
        msg = "the loader is empty: it has no batch; look at its dataset, its sampler, and drop_last"
        raise ConfigError(msg)
    check_positive("the number of batches in the loader", has)
    if wanted is not None and wanted > has:
        msg = (
            f"steps_per_epoch={wanted} is more than the loader has: it would have ended after {has} of "
            f"{wanted} batches; give steps_per_epoch={has}, or none, and more epochs"
        )
        raise LoaderError(msg)
    steps = has if wanted is None else wanted
    if limits.overfit_batches is None:
        return steps
    return min(steps, limits.overfit_batches)
