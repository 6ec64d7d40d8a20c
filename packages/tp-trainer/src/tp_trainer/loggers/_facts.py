"""What a run is told to its loggers to be: where it runs, with which versions, on which code."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from tp_core.plugins import Selection

from tp_trainer._secrets import mask_arguments

__all__ = ["candidates", "environment", "versions"]

_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_NODELIST", "SLURM_RESTART_COUNT")
_OWN = ("TP_BACKEND", "TP_DISABLE_PLUGINS", "TP_STATE_DIR")
_GIT_S = 10.0
_COMMIT = "# branch.oid "


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return where this process runs, and the revision of the code in its folder where git knows one."""
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
    # Names of files may have bytes that are no text, which trackers refuse.
    return {name: value.encode(errors="backslashreplace").decode() for name, value in facts.items()}


def _revision() -> str:
    """Return the commit of the working folder, with a word if files differ from it."""
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
    """Return the versions of Python, of torch and numpy, and of the distributions that bring plugins."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "torch", "tp-core"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    # Not all distributions: to read what each says of itself takes longer than many a step.
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
