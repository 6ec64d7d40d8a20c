"""``tp verify --resume``: a command of any library is run, killed, and started again; see ``_certificates``.

No program is changed, and none has to know of tp: ``_recorder_path`` is put on ``PYTHONPATH``, and each
Python process of the command imports what is in it.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError

from tp_verify._certificates import Certificate, RecordedRun, certify, read_ranks
from tp_verify._recorder_path import sitecustomize as recorder
from tp_verify._report import Finding

FOLDER, RANKS = "{folder}", "{ranks}"
"""What stands in the command for the folder of checkpoints and the number of ranks."""


@dataclass(frozen=True)
class Kill:
    """Where a run is ended.

    Attributes:
        step: The optimizer step after which it is.
        signal: SIGKILL, to all processes at once, or SIGTERM, to the one that the command began with.
        moment: The moment of what is written after that step; ``None`` for right after the step.
        what: What happens at that moment, in words.
    """

    step: int
    signal: signal.Signals
    moment: int | None = None
    what: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        when = f"after step {self.step}"
        if self.moment is not None:
            when = f"in the save after step {self.step} {self.what}"
        return f"{self.signal.name} {when}"

    def settings(self) -> dict[str, int]:
        """Return it as the recorder takes it."""
        found = {"signal": int(self.signal), "step": self.step}
        if self.moment is not None:
            found["moment"] = self.moment
        return found


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains, and that continues from what is in its folder when it is started again.

    Attributes:
        words: The command; ``{folder}`` and ``{ranks}`` in it are replaced.
        folder: Where records and checkpoints of all runs go.
        timeout_s: The deadline of each run.
    """

    words: Sequence[str]
    folder: Path
    timeout_s: float

    def run(self, label: str, saved: Path, ranks: int, kill: Kill | None = None) -> tuple[RecordedRun, bool]:
        """Run it once, and return what its ranks recorded, and whether the kill came.

        Raises:
            ConfigError: It cannot be started, or not be recorded.
        """
        records = self.folder / label
        records.mkdir()
        saved.mkdir(exist_ok=True)
        settings: dict[str, Any] = {"records": str(records), "folder": str(saved), "kill": {}}
        if kill is not None:
            settings["kill"] = kill.settings()
        path = [str(Path(recorder.__file__).parent)]
        if os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        environ = {**os.environ, recorder.VARIABLE: json.dumps(settings), "PYTHONPATH": os.pathsep.join(path)}
        words = [word.replace(FOLDER, str(saved)).replace(RANKS, str(ranks)) for word in self.words]
        began = time.monotonic()
        output = records / "output"
        with output.open("wb") as file:
            try:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environ,
                    start_new_session=True,
                )
            except OSError as error:
                msg = f"the command cannot be started: {error}"
                raise ConfigError(msg) from error
            try:
                (records / recorder.PID).write_text(str(process.pid))
                status = process.wait(self.timeout_s)
                failed = _failed(status, output)
            except subprocess.TimeoutExpired:
                failed = f"it had not ended after {self.timeout_s:g} s"
            finally:
                process.kill()  # for one that dropped its environment
                recorder.end_all(str(records))
                process.wait()
        lines = [_lines(file) for file in sorted(records.glob("*.jsonl"))]
        has_ended = any(line["event"] == "end" for process_lines in lines for line in process_lines)
        return RecordedRun(read_ranks(lines), failed, time.monotonic() - began), has_ended


def _failed(status: int, output: Path) -> str:
    if status == 0:
        return ""
    reason = f"it ended with status {status}"
    if status < 0:
        reason = f"it ended by {signal.Signals(-status).name}"
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    if said:
        reason = f"{reason}: {said[-1]}"
    return reason


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for line in file.read_bytes().split(b"\n")[:-1]:  # without a line that was cut
        lines.append(json.loads(line))
    return lines


def verify_resume(
    words: Sequence[str],
    *,
    ranks: Sequence[int],
    kill_at: Sequence[int],
    in_save: bool,
    by: signal.Signals,
    timeout_s: float,
) -> list[Certificate]:
    """Run a command undisturbed; then kill it and start it again, for each kill; return the certificates.

    Args:
        words: The command, with ``{folder}`` where the folder of its checkpoints stands, and ``{ranks}``
            where the number of its ranks does.
        ranks: The number of ranks, then those that resume; by default as many.
        kill_at: The steps after which it is killed; by default one step after its first save, and one after
            its last before the end.
        in_save: Whether it is killed inside a save, too.
        by: The signal.
        timeout_s: The deadline of each run.

    Raises:
        ConfigError: The command does not say where it saves, does not train, or saves nothing.
    """
    if not any(FOLDER in word for word in words):
        msg = (
            f"write {FOLDER} in the command where the folder of its checkpoints stands: each run has its own"
        )
        raise ConfigError(msg)
    if ranks and not any(RANKS in word for word in words):
        msg = f"--ranks is for a command with {RANKS} in it, as torchrun --nproc-per-node {RANKS} train.py"
        raise ConfigError(msg)
    if not ranks and any(RANKS in word for word in words):
        msg = f"the command has {RANKS}: say how many with --ranks, such as --ranks 2"
        raise ConfigError(msg)
    first = ranks[0] if ranks else 1
    certificates = []
    with tempfile.TemporaryDirectory(prefix="tp-verify-") as name:
        folder = Path(name).resolve()
        command = TrainingCommand(words, folder, timeout_s)
        whole, _ = command.run("whole", folder / "saved-whole", first)
        _check_trained(whole, first if ranks else 0)
        for number, kill in enumerate(_kills(whole, kill_at, by, in_save=in_save)):
            saved = folder / f"saved-{number}"
            killed, has_ended = command.run(f"killed-{number}", saved, first, kill)
            if not has_ended:
                msg = f"{kill}: a second run did not come to this; it trains or saves otherwise each time"
                raise ConfigError(msg)
            if "had not ended" in killed.failed:
                finding = Finding("the killed run", "", 0, f"after the {by.name} {killed.failed}")
                certificates.append(Certificate(str(kill), [finding], "", [], killed.seconds))
                continue
            kept = folder / f"kept-{number}"
            saved.rename(kept)
            for again in ranks[1:] or [first]:
                # Of the same name: it may have its own path in it.
                shutil.copytree(kept, saved, symlinks=True)
                resumed, _ = command.run(f"resumed-{number}-on-{again}", saved, again)
                is_inside = kill.moment is not None
                certificates.append(certify(str(kill), whole, killed, resumed, is_inside=is_inside))
                shutil.rmtree(saved)
    return certificates


def _check_trained(whole: RecordedRun, ranks: int) -> None:
    """Check that the undisturbed run can be the measure of others.

    Raises:
        ConfigError: It failed, or what it does cannot be seen.
    """
    if whole.failed:
        msg = f"the command does not train: {whole.failed}"
        raise ConfigError(msg)
    if not whole.steps:
        msg = (
            "no step of a torch optimizer was seen in the command: nothing can be certified. Python has to "
            "read PYTHONPATH (no -I, no -E), and the optimizer has to be one of torch's, or derived from it"
        )
        raise ConfigError(msg)
    if ranks and len(whole.ranks) != ranks:
        msg = f"{ranks} ranks were asked for, and {len(whole.ranks)} trained"
        raise ConfigError(msg)
    if not any(rank.saves() for rank in whole.ranks):
        msg = f"the command wrote nothing to {FOLDER} in {whole.steps} steps: does it save there?"
        raise ConfigError(msg)


def _kills(whole: RecordedRun, kill_at: Sequence[int], by: signal.Signals, *, in_save: bool) -> list[Kill]:
    """Return where a command is killed, by what its undisturbed run has saved.

    Raises:
        ConfigError: There is no such step, or nothing is saved before it.
    """
    saves = [step for step in whole.ranks[0].saves() if step < whole.steps]
    steps = list(kill_at)
    if not steps and saves:
        steps = sorted({saves[0] + 1, saves[-1] + 1})
    elif not steps and by == signal.SIGTERM:  # it may save then
        steps = [max(1, whole.steps // 2)]
    if not steps:
        msg = f"the command saves nothing before its last step, {whole.steps}: nothing could be resumed"
        raise ConfigError(msg)
    for step in steps:
        if not 1 <= step <= whole.steps:
            msg = f"--kill-at {step}: the command makes {whole.steps} steps"
            raise ConfigError(msg)
        if by == signal.SIGKILL and not any(save < step for save in saves):
            if saves:
                first = f"the first save is after step {saves[0]}"
            else:
                first = "it saves at its end alone"
            msg = f"--kill-at {step}: nothing would be saved before; {first}"
            raise ConfigError(msg)
    kills = [Kill(step, by) for step in steps]
    if in_save and saves:
        kills += _inside(whole, saves[:2][-1], by)
    elif in_save:
        msg = "--kill-in-save: the command saves nothing before its last step"
        raise ConfigError(msg)
    return kills


def _inside(whole: RecordedRun, step: int, by: signal.Signals) -> list[Kill]:
    """Return the moments of a save: the first file that is half there, one in the middle, and the last."""
    moments = [moment for moment in whole.ranks[0].moments if moment["step"] == step]
    half = next((at for at, moment in enumerate(moments) if moment["is_half"]), 0)
    chosen = sorted({half, len(moments) // 2, len(moments) - 1})
    return [Kill(step, by, moments[at]["number"], moments[at]["what"]) for at in chosen]
