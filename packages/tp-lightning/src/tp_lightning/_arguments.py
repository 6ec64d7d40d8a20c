"""The arguments of Lightning's trainer in tp's terms; others are refused, with what to write instead."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tp_core import LaunchEnvironment, available_devices
from tp_core.device_types import lightning_accelerators
from tp_core.errors import ConfigError
from tp_trainer import DdpOptions, Limits

Stage = Literal["fit", "validate", "test", "predict"]

# Arguments that are not here, and what to write instead.
_ELSEWHERE = {
    "barebones": "Trainer(logger=False)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "fast_dev_run": "tp_trainer.tuning.dry_run(trainer, model, optimizer, loader, step=step), or max_steps=2",
    "min_epochs": "a callback that sets trainer.should_stop",
    "min_steps": "a callback that sets trainer.should_stop",
    "model_registry": "trainer.save_checkpoint(path)",
    "num_nodes": "tp launch --nnodes 2 (pip install tp-launch)",
    "plugins": "Trainer(precision='bf16-mixed'), or a backend",
    "profiler": "callbacks=[tp_trainer.callbacks.Profiler('profile')]",
    "reload_dataloaders_every_n_epochs": "a dataset with set_epoch, or a sampler with it",
    "use_distributed_sampler": "nothing: tp splits the batches over the ranks itself",
}
# Names of Lightning that are not here, and what to write instead: modules keep the classes of Lightning.
NAMES = {
    "Callback": "from tp_trainer import Callback, or Lightning's own: from lightning import Callback",
    "LightningDataModule": "from lightning import LightningDataModule: a datamodule keeps its class",
    "LightningModule": "from lightning import LightningModule: a module keeps its class, or is a nn.Module",
    "callbacks": "from tp_trainer import callbacks, or from lightning.pytorch import callbacks",
    "loggers": "logger='csv', or from tp_trainer import loggers",
    "seed_everything": "torch.manual_seed(0)",
}
_WITHOUT_EFFECT = ("enable_model_summary", "enable_autolog_hparams", "inference_mode")
_STRATEGIES = {
    "auto": "ddp",
    "ddp": "ddp",
    "ddp_find_unused_parameters_true": "ddp",
    "ddp_spawn": "ddp",
    "ddp_notebook": "ddp",
    "fsdp": "fsdp",
}
_PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "bf16-true": "bf16-true",
}


def refuse_arguments(others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for the first argument that is not here, unless its value asks for nothing.

    Raises:
        ConfigError: There is one.
    """
    for name, value in others.items():
        if name in _WITHOUT_EFFECT or (name in _ELSEWHERE and value in (None, False)):
            continue
        if name in _ELSEWHERE:
            hint = f"; with tp, write {_ELSEWHERE[name]}"
        else:
            names = list(known)
            close = difflib.get_close_matches(name, names, 1)
            if close:
                hint = f"; did you mean {close[0]!r}? It has: "
            else:
                hint = "; it has: "
            hint += ", ".join(names)
        msg = f"this Trainer has no argument {name!r}{hint}"
        raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class HardwareArguments:
    """Where a run takes place, and in which precision.

    Raises:
        ConfigError: A value is not here, or no launcher started that many processes.
    """

    accelerator: str
    strategy: Any
    devices: Any
    precision: Any
    backend: str | None
    options: Any
    sync_batchnorm: bool
    environment: LaunchEnvironment

    def __post_init__(self) -> None:
        self._check_devices()
        if self.backend is None and self.strategy not in _STRATEGIES:
            names = ", ".join(_STRATEGIES)
            msg = f"strategy={self.strategy!r} is not here: {names} are, or write backend='shard'"
            raise ConfigError(msg)
        if self._precision_text not in _PRECISIONS:
            msg = f"precision={self.precision!r} is not here: {', '.join(_PRECISIONS)} are"
            raise ConfigError(msg)
        accelerators = lightning_accelerators()
        if self.accelerator not in accelerators:
            msg = f"accelerator={self.accelerator!r} is not here: {', '.join(map(repr, accelerators))} are"
            raise ConfigError(msg)

    def _check_devices(self) -> None:
        devices = self.devices
        if isinstance(devices, list | tuple):
            wanted = len(devices)
        else:
            wanted = devices
        if isinstance(wanted, str):
            wanted = int(wanted) if wanted.isdigit() else -1
        here = self.environment.local_world_size
        if wanted not in (-1, None, here):
            how = f"start it with: tp launch -n {wanted} script.py (pip install tp-launch)"
            msg = f"devices={devices!r}, and a launcher started {here} process(es) on this host; {how}"
            raise ConfigError(msg)

    @property
    def _precision_text(self) -> str:
        if self.precision is None:
            return "32"
        return str(self.precision)

    @property
    def tp_backend(self) -> str:
        """The name of tp's backend."""
        if self.backend is not None:
            return self.backend
        if self.environment.is_distributed:
            return _STRATEGIES[self.strategy]
        return "single"

    @property
    def tp_devices(self) -> Any:
        """The devices, as tp's trainer takes them."""
        if self.accelerator == "cpu":
            return "cpu"
        if self.environment.is_distributed:
            return "auto"
        return available_devices()[0]

    @property
    def tp_precision(self) -> Any:
        """The precision, as tp's trainer takes it."""
        return _PRECISIONS[self._precision_text]

    @property
    def tp_options(self) -> Any:
        """The options of the backend."""
        if self.options is None and self.tp_backend == "ddp":
            unused = self.strategy == "ddp_find_unused_parameters_true"
            return DdpOptions(find_unused_parameters=unused, sync_batchnorm=self.sync_batchnorm)
        return self.options


@dataclass(frozen=True, slots=True)
class LengthArguments:
    """How long a run is: ``None`` for no limit."""

    epochs: int | None
    steps: int | None
    time: Any
    overfit_batches: int | None

    @classmethod
    def parse(
        cls, max_epochs: int | None, max_steps: int, max_time: Any, overfit_batches: int
    ) -> "LengthArguments":
        """Return the limits of Lightning's arguments: 1000 epochs where there is none, as there."""
        if max_epochs is None and max_steps == -1:
            max_epochs = 1000
        epochs = None if max_epochs == -1 else max_epochs
        steps = None if max_steps == -1 else max_steps
        return cls(
            epochs=epochs,
            steps=steps,
            time=_seconds(max_time),
            overfit_batches=overfit_batches or None,
        )

    def limits(self, steps_per_epoch: int | None) -> Limits:
        """Return tp's limits."""
        return Limits(
            epochs=self.epochs,
            max_steps=self.steps,
            max_time=self.time,
            overfit_batches=self.overfit_batches,
            steps_per_epoch=steps_per_epoch,
        )


def _seconds(time: Any) -> Any:
    """Return a time in seconds, or as text of tp: Lightning's text is "days:hours:minutes:seconds"."""
    if time is None or isinstance(time, int | float):
        return time
    if hasattr(time, "total_seconds"):
        return time.total_seconds()
    if isinstance(time, str) and time.count(":") == 3:
        days, hours, minutes, seconds = map(int, time.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return time


@dataclass(frozen=True, slots=True)
class BatchArguments:
    """How many batches of a loader each stage takes: a number, a fraction of them, or ``None`` for all."""

    fit: float | None
    validate: float | None
    test: float | None
    predict: float | None

    def of(self, stage: Stage) -> float | None:
        """Return the limit of a stage."""
        limit: float | None = getattr(self, stage)
        return limit

    def cut(self, stage: Stage, length: int) -> int:
        """Return the number of batches of a loader of a length; 0 is a length that nobody knows."""
        limit = self.of(stage)
        if limit is None:
            return length
        if isinstance(limit, float):
            return int(length * limit)
        if length:
            return min(length, limit)
        return limit


@dataclass(frozen=True, slots=True)
class ValidationArguments:
    """When a run validates."""

    interval: float | None  # batches, or a fraction of an epoch
    every_epochs: int
    sanity_batches: int


@dataclass(frozen=True, slots=True)
class GradientArguments:
    """What becomes of gradients before an optimizer step."""

    accumulate: int
    clip: float | None
    algorithm: str


@dataclass(frozen=True, slots=True)
class LoggingArguments:
    """What a run logs to, and how often."""

    loggers: list[Any]
    every_steps: int
