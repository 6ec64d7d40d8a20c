"""The hook implementations of tp-trainer. The import is light: the hooks import heavy modules."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tp_core.plugins import Command, LoggerFactory, hookimpl

if TYPE_CHECKING:
    from tp_core.plugins import Backend

tp_contract = 1


@hookimpl
def tp_backends() -> "Iterable[Backend[Any]]":
    """Return the backends for one device, and for one process per device with whole or sharded parameters."""
    from tp_trainer._backends import DdpBackend, FsdpBackend, SingleBackend

    return [SingleBackend(), DdpBackend(), FsdpBackend()]


@hookimpl
def tp_loggers() -> Iterable[LoggerFactory]:
    """Return factories of the loggers: files, TensorBoard, Weights & Biases, MLflow and Aim."""
    from tp_trainer.loggers import _named

    return _named.factories()


def _report_app() -> Any:
    from tp_trainer._report import report_app

    return report_app()


def _estimate_app() -> Any:
    from tp_trainer._memory._estimate import estimate_app

    return estimate_app()


def _convert_app() -> Any:
    from tp_trainer._convert import convert_app

    return convert_app()


def _test_app() -> Any:
    from tp_trainer._self_test import test_app

    return test_app()


def _train_app() -> Any:
    from tp_trainer._train import train_app

    return train_app()


def _launch_app() -> Any:
    from tp_trainer._launch._cli import launch_app

    return launch_app()


def _jobs_app() -> Any:
    from tp_trainer._launch._jobs._commands import jobs_app

    return jobs_app()


def _logs_app() -> Any:
    from tp_trainer._launch._jobs._commands import logs_app

    return logs_app()


def _stop_app() -> Any:
    from tp_trainer._launch._jobs._commands import stop_app

    return stop_app()


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return the commands of this package."""
    return [
        Command(
            "launch",
            "Run a script in several processes, here or on several hosts.",
            _launch_app,
        ),
        Command("train", "Run a function of a script with values from options and files.", _train_app),
        Command("jobs", "List the jobs that `tp launch --detach` started.", _jobs_app),
        Command("logs", "Show what a background job has printed.", _logs_app),
        Command("stop", "End a background job.", _stop_app),
        Command("report", "Make one HTML page of what runs have left in their folders.", _report_app),
        Command("convert", "Write the model of a checkpoint as safetensors.", _convert_app),
        Command("test", "Train a small model on every installed backend; compare the numbers.", _test_app),
        Command("estimate", "Print what training a model needs on each device.", _estimate_app),
    ]
