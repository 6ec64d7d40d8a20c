"""``trainer.verify``: the running script, verified by ``tp verify`` in processes of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_core.errors import ConfigError
from tp_core.plugins import registry


@dataclass(frozen=True, slots=True)
class Verification:
    """The reports of ``tp verify`` about a script. It is true where nothing parted.

    Attributes:
        ok: Whether nothing parted.
        text: The reports as text; empty within a run that ``tp verify`` has started.
        reports: What ``tp verify --json`` prints of each trial.
    """

    ok: bool
    text: str
    reports: Sequence[Mapping[str, Any]]

    def __bool__(self) -> bool:
        """Return :attr:`ok`."""
        return self.ok

    def __str__(self) -> str:
        """Return :attr:`text`."""
        return self.text


def verify_this_script(*, steps: int | None, timeout_s: float, world_size: int) -> Verification:
    """Run ``tp verify`` on the running script with its arguments; see :meth:`Trainer.verify`."""
    if "TP_VERIFY" in os.environ:  # which tp-verify gives its runs: they would start others
        return Verification(ok=True, text="", reports=())
    if world_size > 1:
        msg = f"trainer.verify() starts its own ranks: run the script as one process, not as {world_size}"
        raise ConfigError(msg)
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        msg = "trainer.verify() runs the script again, and this program is none: put it into a file"
        raise ConfigError(msg)
    # By its command: packages of tp do not import each other.
    if not any(command.item.name == "verify" for command in registry.commands()):
        registry.require("tp-verify")
        msg = "trainer.verify() needs the command `tp verify`: pip install tp-verify"
        raise ConfigError(msg)
    # -P: no modules of the current folder in the place of Python's own, as for the installed command.
    command = [sys.executable, "-P", "-m", "tp_core.cli", "verify", script, "--json"]
    if steps is not None:
        command += ["--steps", str(steps)]
    command += ["--timeout-s", str(timeout_s), "--", *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        msg = f"tp verify {script} failed: {_said(done.stderr)}"
        raise ConfigError(msg)
    return Verification(**json.loads(done.stdout))


def _said(stderr: str) -> str:
    """Return the message of a command that was asked for JSON."""
    last = (stderr.strip().splitlines() or [""])[-1]
    try:
        message: str = json.loads(last)["error"]["message"]
    except ValueError:
        return last
    return message
