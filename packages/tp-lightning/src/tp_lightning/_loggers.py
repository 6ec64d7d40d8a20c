"""Lightning's loggers in tp's terms, and what a module sees as its logger."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_trainer import loggers as own_loggers


def loggers_of(given: Any) -> list[Any]:
    loggers: list[Any] = []
    if not isinstance(given, list | tuple):
        given = [given]
    for logger in given:
        kind = type(logger).__name__
        if logger is None or isinstance(logger, bool):
            continue
        if kind == "CSVLogger":
            loggers.append(own_loggers.CsvLogger(logger.log_dir))
        elif kind == "TensorBoardLogger" and not hasattr(logger, "load_state_dict"):
            loggers.append(own_loggers.TensorBoardLogger(logger.log_dir))
        elif kind == "WandbLogger" and not hasattr(logger, "load_state_dict"):
            loggers.append("wandb")
        else:
            loggers.append(logger)
    return loggers


class LoggerView:
    """What ``self.logger`` is in a module: numbers go to the run's loggers."""

    name = version = None

    def __init__(self, log: Callable[[Mapping[str, Any]], None]) -> None:
        self._log = log

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # noqa: ARG002 - the run's
        self._log(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run logs the module's ``hparams``."""

    def __getattr__(self, name: str) -> Any:
        msg = (
            f"self.logger has no {name!r} here; give tp's own: logger=tp_trainer.loggers.TensorBoardLogger()"
        )
        raise AttributeError(msg)
