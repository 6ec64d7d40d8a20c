"""The hook implementations of tp-trainer. The import is light: the hooks import heavy modules."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tp_core.plugins import Command, LoggerFactory, hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    from tp_trainer._backends import DdpBackend, FsdpBackend, SingleBackend

    return [SingleBackend(), DdpBackend(), FsdpBackend()]


def _late(module: str, name: str) -> Callable[[], Any]:
    """Return a function that imports what the registry asks for, and makes it."""

    def make() -> Any:
        return getattr(import_module(f"tp_trainer.{module}"), name)()

    return make


@hookimpl
def tp_loggers() -> Iterable[LoggerFactory]:
    return [
        LoggerFactory("csv", "metrics.csv in the run's folder", _late("loggers", "CsvLogger")),
        LoggerFactory("jsonl", "log.jsonl in the run's folder", _late("loggers", "JsonLinesLogger")),
        LoggerFactory(
            "mlflow", "a run of MLflow", _late("loggers._mlflow", "MlflowLogger"), "tp-trainer[mlflow]"
        ),
        LoggerFactory(
            "tensorboard",
            "event files in the run's folder",
            _late("loggers._tensorboard", "TensorBoardLogger"),
            "tp-trainer[tensorboard]",
        ),
        LoggerFactory(
            "wandb", "a run of Weights & Biases", _late("loggers._wandb", "WandbLogger"), "tp-trainer[wandb]"
        ),
    ]


@hookimpl
def tp_commands() -> Iterable[Command]:
    return [
        Command(
            "train",
            "Run a function of a script with values from options and files.",
            _late("_train", "train_app"),
        ),
        Command(
            "report",
            "Make one HTML page of what runs have left in their folders.",
            _late("_commands", "report_app"),
        ),
        Command(
            "convert", "Write the model of a checkpoint as safetensors.", _late("_commands", "convert_app")
        ),
        Command(
            "estimate",
            "Print the layouts that fit, by the memory of a device.",
            _late("_commands", "estimate_app"),
        ),
    ]
