"""What users give as ``log=``: names of loggers, and loggers."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from tp_core.errors import ConfigError
from tp_core.plugins import Logger, LoggerFactory, PluginRegistry

__all__ = ["LogSpec", "factories", "make_loggers"]

LogSpec = str | Logger | Iterable[str | Logger] | None
"""A name, a logger, several of them, or ``None`` for none."""


def factories() -> list[LoggerFactory]:
    """Return what makes the loggers of this package: what is heavy is imported when one is made."""
    return [
        _factory("aim", "a run of Aim", "AimLogger", extra="aim"),
        _factory("csv", "metrics.csv in the run's folder", "CsvLogger"),
        _factory("jsonl", "log.jsonl in the run's folder", "JsonLinesLogger"),
        _factory("mlflow", "a run of MLflow", "MlflowLogger", extra="mlflow"),
        _factory("tensorboard", "event files in the run's folder", "TensorBoardLogger", extra="tensorboard"),
        _factory("wandb", "a run of Weights & Biases", "WandbLogger", extra="wandb"),
    ]


def _factory(name: str, text: str, kind: str, *, extra: str = "") -> LoggerFactory:
    def make() -> Logger:
        from tp_trainer import loggers

        made: Logger = getattr(loggers, kind)()
        return made

    return LoggerFactory(name, text, make, f"tp-trainer[{extra}]" if extra else "")


def make_loggers(log: LogSpec, plugins: PluginRegistry) -> list[Logger]:
    """Return the loggers that ``log`` asks for, in its order.

    Raises:
        ConfigError: There is no logger of a name, or what it needs is not installed; or an entry is neither.
        PluginError: The plugin that brings it is broken or blocked.
    """
    if log is None:
        return []
    if isinstance(log, str | Logger) or not isinstance(log, Iterable):
        log = [log]
    made = [entry if isinstance(entry, Logger) else _make(entry, plugins) for entry in log]
    for position, logger in enumerate(made):
        if any(logger is other for other in made[:position]):
            msg = f"the same {type(logger).__name__} is in log= twice; make one for each place"
            raise ConfigError(msg)
    return made


def _make(name: object, plugins: PluginRegistry) -> Logger:
    known = {found.item.name: found.item for found in plugins.loggers()}
    if isinstance(name, str) and name in known:
        made = known[name].make()
        if not isinstance(made, Logger):
            msg = f"the factory of the logger {name!r} must make a Logger, got {type(made).__name__}"
            raise ConfigError(msg)
        return made
    if isinstance(name, str):
        plugins.require(name)
        msg = f"there is no logger {name!r}; {_advice(name, list(known.values()))}"
        raise ConfigError(msg)
    example = f"{name.__name__}()" if isinstance(name, type) else "'csv' or CsvLogger('run')"
    msg = f"log= takes names of loggers and loggers, as {example}; got {name!r:.100}"
    raise ConfigError(msg)


def _advice(name: str, known: Sequence[LoggerFactory]) -> str:
    """Return what may have been meant, with what to install for it."""
    meant = get_close_matches(name.lower(), [factory.name for factory in known], n=1)
    if meant:
        extra = next(factory.extra for factory in known if factory.name == meant[0])
        return f"did you mean {meant[0]!r}?" + (f" (pip install '{extra}')" if extra else "")
    return f"those there are: {', '.join(repr(f.name) for f in known) or 'none'}"
