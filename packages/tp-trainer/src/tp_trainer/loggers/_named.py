"""The argument ``log=`` of a run: loggers, or their names; and the facts about a run for them."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from tp_core.discovery import PluginRegistry, Selection
from tp_core.errors import ConfigError
from tp_core.internal import write_atomically
from tp_core.plugins import Logger, LoggerFactory, RunInfo, RunStatus

from tp_trainer._secrets import mask_arguments
from tp_trainer.loggers._files import keep_aside, place_for

LogSpec = str | Logger | Iterable[str | Logger] | None
"""A name, a logger, several of them, or ``None`` for none."""


def factories() -> list[LoggerFactory]:
    """Return the factories of this package's loggers; a logger's imports happen when it is made."""
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
        ConfigError: There is no logger of a name, or its package is not installed; or an entry is neither.
        PluginError: Its plugin is broken or blocked.
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
    """Return the closest known name, with the extra to install for it."""
    meant = get_close_matches(name.lower(), [factory.name for factory in known], n=1)
    if meant:
        extra = next(factory.extra for factory in known if factory.name == meant[0])
        return f"did you mean {meant[0]!r}?" + (f" (pip install '{extra}')" if extra else "")
    return f"those there are: {', '.join(repr(f.name) for f in known) or 'none'}"


# -- Facts about a run for its loggers: environment, versions, revision, candidates ---------------


_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_NODELIST", "SLURM_RESTART_COUNT")
_OWN = ("TP_BACKEND", "TP_DISABLE_PLUGINS", "TP_STATE_DIR")
_GIT_S = 10.0  # then the revision is left out
_COMMIT = "# branch.oid "


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return facts about this process and host, and the git revision of the working folder, if any."""
    environ = os.environ if environ is None else environ
    facts = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "command": " ".join(mask_arguments(sys.argv)),
        "folder": os.getcwd(),  # noqa: PTH109 - a text
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        name_of = getattr(torch.get_device_module(accelerator), "get_device_name", lambda _: accelerator.type)
        facts["gpus"] = ", ".join(map(name_of, range(torch.accelerator.device_count())))
    if revision := _revision():
        facts["git_revision"] = revision
    facts |= {name: environ[name] for name in (*_OWN, *_SLURM) if name in environ}
    # File names may have bytes that are not UTF-8, which trackers refuse.
    return {name: value.encode(errors="backslashreplace").decode() for name, value in facts.items()}


def _revision() -> str:
    """Return the commit of the working folder, with "with changes" if files differ from it."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or one that does not answer
        return ""
    lines = done.stdout.splitlines()
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), "")
    if not commit or commit == "(initial)":
        return ""
    changed = any(not line.startswith("#") for line in lines)
    return f"{commit}, with changes" if changed else commit


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, torch, numpy, and the distributions with plugins."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "torch", "tp-core"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    # Not of all distributions: reading all their metadata takes longer than many a step.
    brought = {point.dist for point in entry_points(group="tp.plugins") if point.dist is not None}
    found |= {str(distribution.name).lower(): distribution.version for distribution in brought}
    return {name: found[name] for name in sorted(found)}


def candidates(selection: Selection) -> tuple[dict[str, object], ...]:
    """Return the verdicts on all backends as plain values."""
    return tuple(
        {
            "name": candidate.name,
            "origin": candidate.origin,
            "score": candidate.verdict.score,
            "reason": candidate.verdict.reason,
            "chosen": candidate is selection.chosen,
        }
        for candidate in selection.candidates
    )


# -- The values of a call of ``tp train`` ---------------------------------------------------------


CONFIG = "config.yaml"
"""The file in a run's folder with its values, for ``tp train ... --config``."""


@dataclass(frozen=True, slots=True)
class GivenValues:
    """The values of a call of ``tp train``.

    Attributes:
        by_name: Plain values by their options' names: "optim.lr" of a nested one.
        text: All of them as YAML, which ``--config`` reads.
    """

    by_name: Mapping[str, Any]
    text: str


_GIVEN: ContextVar[GivenValues | None] = ContextVar("given_values", default=None)


def given_values() -> GivenValues | None:
    """Return the values of the function that is running; ``None`` where ``tp train`` runs none."""
    return _GIVEN.get()


@contextmanager
def running_with(values: GivenValues) -> Iterator[None]:
    """Let runs within the context log these values, and write them into their folders."""
    token = _GIVEN.set(values)
    try:
        yield
    finally:
        _GIVEN.reset(token)


class ValuesLogger(Logger):
    """Writes ``config.yaml`` into the run's folder; an older file becomes ``config-1.yaml``.

    Args:
        text: The contents of the file.
    """

    name: ClassVar[str] = "values"

    def __init__(self, text: str) -> None:
        self._text = text

    def open(self, info: RunInfo) -> None:
        """Write the file, unless it exists with the same contents."""
        path = place_for("ValuesLogger", None, info) / CONFIG
        if path.is_file() and path.read_text(encoding="utf-8") == self._text:
            return

        def write(part: Path) -> None:
            part.write_text(self._text, encoding="utf-8")

        keep_aside(path)
        # Readable for its user alone: ``--config`` needs the values unmasked, a token too.
        write_atomically(write, path, mode=0o600)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Ignore the numbers."""

    def close(self, status: RunStatus) -> None:
        """Do nothing: the file is closed."""
