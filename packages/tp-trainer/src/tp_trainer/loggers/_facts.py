"""What a run is told to its loggers to be: where it runs, with which versions, on which code."""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch
from tp_core.plugins import Selection

__all__ = ["candidates", "environment", "mask_secrets", "versions"]

_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_NODELIST", "SLURM_RESTART_COUNT")
_OWN = ("TP_BACKEND", "TP_DISABLE_PLUGINS", "TP_STATE_DIR")
_GIT_S = 10.0
_COMMIT = "# branch.oid "
_MASK = "***"
_SECRET = {"credential", "credentials", "passwd", "password", "secret", "secrets"}  # anywhere in a name
_SECRET_LAST = {"key", "keys", "token"}  # as its last word: "api_key", and neither "key_dim" nor "max_tokens"
_NO_SECRET = {"bos", "cls", "eos", "mask", "pad", "sep", "sort", "unk"}  # "pad_token" is a tokenizer's


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return where this process runs, and the revision of the code in its folder where git knows one."""
    environ = os.environ if environ is None else environ
    facts = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "command": " ".join(_masked_arguments(sys.argv)),
        "folder": os.getcwd(),  # noqa: PTH109 - a text
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        name_of = getattr(torch.get_device_module(accelerator), "get_device_name", lambda _: accelerator.type)
        facts["gpus"] = ", ".join(map(name_of, range(torch.accelerator.device_count())))
    if revision := _revision():
        facts["git_revision"] = revision
    return facts | {name: environ[name] for name in (*_OWN, *_SLURM) if name in environ}


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return plain values with ``***`` for each text that is called a token, key, secret or password.

    Args:
        value: A value, or mappings and lists of them.
        name: What it is called.
    """
    if isinstance(value, Mapping):
        return {key: mask_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (
            type(value)(mask_secrets(item, name) for item in value) if type(value) in {list, tuple} else value
        )
    return _MASK if isinstance(value, str | bytes) and value and _is_secret(name) else value


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]
    if _SECRET & {*words}:
        return True
    return bool(words) and words[-1] in _SECRET_LAST and not _NO_SECRET & {*words}


def _masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command: of ``--token x``, ``--token=x`` and ``TOKEN=x`` the value is masked."""
    masked, is_next_secret = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if is_next_secret and not word.startswith("--"):
            masked.append(_MASK)
            is_next_secret = False
            continue
        is_secret = _is_secret(name.rpartition(".")[2] if name.startswith("-") or equals else "")
        masked.append(f"{name}={_MASK}" if is_secret and equals else word)
        is_next_secret = is_secret and not equals
    return masked


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
