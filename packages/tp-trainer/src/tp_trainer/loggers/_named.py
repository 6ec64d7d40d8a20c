"""The argument ``log=`` of a run: loggers, or their names; and the facts about a run for them."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, ClassVar

import torch
from tp_core.discovery import PluginRegistry, Selection
from tp_core.errors import ConfigError
from tp_core.files import atomic_part
from tp_core.plugins import Logger, LoggerFactory, RunInfo, RunStatus
from tp_core.secrets import mask_arguments

from tp_trainer.loggers._files import keep_aside

LogSpec = str | Logger | Iterable[str | Logger] | None
"""A name, a logger, several of them, or ``None`` for none."""


def make_loggers(log: LogSpec, plugins: PluginRegistry) -> list[Logger]:
    """Return the loggers that ``log`` asks for, in its order."""
    if log is None:
        return []
    if isinstance(log, str | Logger) or not isinstance(log, Iterable):
        log = [log]
    log = list(log)
    for position, entry in enumerate(log):
        if isinstance(entry, str) and entry in log[:position]:
            msg = f"{entry!r} is in log= twice, and both would write one file; give it once"
            raise ConfigError(msg)
    loggers = [entry if isinstance(entry, Logger) else _make(entry, plugins) for entry in log]
    for position, logger in enumerate(loggers):
        if any(logger is other for other in loggers[:position]):
            msg = f"the same {type(logger).__name__} is in log= twice; make one for each place"
            raise ConfigError(msg)
    return loggers


def _make(name: object, plugins: PluginRegistry) -> Logger:
    factories = {contribution.item.name: contribution.item for contribution in plugins.loggers()}
    if isinstance(name, str) and name in factories:
        logger = factories[name].make()
        if not isinstance(logger, Logger):
            msg = f"the factory of the logger {name!r} must make a Logger, got {type(logger).__name__}"
            raise ConfigError(msg)
        return logger
    if isinstance(name, str):
        plugins.require(name)
        msg = f"there is no logger {name!r}; {_advice(name, list(factories.values()))}"
        raise ConfigError(msg)
    if isinstance(name, type):
        example = f"{name.__name__}()"
    else:
        example = "'csv' or CsvLogger('run')"
    msg = f"log= takes names of loggers and loggers, as {example}; got {name!r:.100}"
    raise ConfigError(msg)


def _advice(name: str, factories: Sequence[LoggerFactory]) -> str:
    """Return the closest known name, with the extra to install for it."""
    similar = get_close_matches(name.lower(), [factory.name for factory in factories], n=1)
    if similar:
        extra = next(factory.extra for factory in factories if factory.name == similar[0])
        install = f" (pip install '{extra}')" if extra else ""
        return f"did you mean {similar[0]!r}?{install}"
    return f"those there are: {', '.join(repr(f.name) for f in factories) or 'none'}"


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
    if changed:
        return f"{commit}, with changes"
    return commit


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, torch, numpy, and the distributions with plugins."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "torch", "tp-core"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    # Not of all distributions: reading all their metadata takes longer than many a step.
    brought = {point.dist for point in entry_points(group="tp.plugins") if point.dist is not None}
    versions |= {str(distribution.name).lower(): distribution.version for distribution in brought}
    return {name: versions[name] for name in sorted(versions)}


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


# -- The values that a program was called with ----------------------------------------------------


CONFIG = "config.yaml"
"""The file in a run's folder with its values, for ``tp train ... --config``."""


_config: ContextVar[tuple[Mapping[str, Any], str] | None] = ContextVar("config", default=None)


@contextmanager
def using_config(values: Mapping[str, Any], text: str) -> Iterator[None]:
    """Let runs within the context log values, and keep a text as ``config.yaml`` in their folders.

    For programs that call training with the values of a command line or of a file, as ``tp train`` does.

    Args:
        values: Hyperparameters by name: "optim.lr" for a nested one.
        text: All of them, as the program can read them again.

    Example:
        >>> with using_config({"lr": 0.1}, "lr: 0.1"):
        ...     trainer.fit(model, optimizer, loader, step=step, checkpoint="run")  # doctest: +SKIP
    """
    token = _config.set((values, text))
    try:
        yield
    finally:
        _config.reset(token)


def config_in_use() -> tuple[Mapping[str, Any], str] | None:
    return _config.get()


class ConfigLogger(Logger):
    """Writes ``config.yaml`` into the run's folder; an older file becomes ``config-1.yaml``."""

    name: ClassVar[str] = "config"

    def __init__(self, folder: Path, text: str) -> None:
        self._folder, self._text = folder, text

    def open(self, info: RunInfo) -> None:  # noqa: ARG002 - it is written before the run
        """Write the file, unless it exists with the same contents."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / CONFIG
        if path.is_file() and path.read_text(encoding="utf-8") == self._text:
            return
        keep_aside(path)
        # Readable for its user alone: ``--config`` needs the values unmasked, a token too.
        with atomic_part(path, mode=0o600) as part:
            part.write_text(self._text, encoding="utf-8")

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Ignore the numbers."""

    def close(self, status: RunStatus) -> None:
        """Do nothing: the file is closed."""
