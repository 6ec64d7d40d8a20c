"""Numbers as event files of TensorBoard."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core.errors import ConfigError
from tp_core.files import showing_system_errors
from tp_core.messages import check_installed
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer._peer_names import explain_fields
from tp_trainer.loggers import LogPlace

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PREFIX = "events.out.tfevents."
_LOOK_S = 0.05
_QUEUE = 1000  # events; with a full queue the run waits for the writing thread, and both compete for the GIL


@explain_fields
class TensorBoardLogger(Logger):
    """Writes event files: ``tensorboard --logdir run`` shows them.

    Numbers are scalars under their names; hyperparameters are on the page HParams; selection, environment
    and versions are texts. A resumed run continues in the same folder, and TensorBoard drops the numbers
    after its checkpoint. A new run renames an older folder to ``tensorboard-1``; if another run still writes
    there, the new run takes such a name itself. TensorBoard stores numbers in 32 bits.

    Args:
        folder: The folder of the files; by default ``tensorboard`` in the folder of the run's checkpoints.
        flush_s: The most seconds until numbers are written to the file.

    Raises:
        ConfigError: TensorBoard is not installed; or, in :meth:`open`, there is no folder, or one that it
            cannot name.
    """

    name: ClassVar[str] = "tensorboard"

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, flush_s: int = 30) -> None:
        check_installed("tensorboard", by="TensorBoardLogger", extra="tp-trainer[tensorboard]")
        self._place = LogPlace("TensorBoardLogger", folder, "tensorboard", files=f"{_PREFIX}*")
        self._flush_s = flush_s
        self._writer: SummaryWriter | None = None
        self._waiting: list[tuple[int, Mapping[str, float]]] = []  # rows since the last flush

    def open(self, info: RunInfo) -> None:
        """Start an event file; after a resume it makes readers drop the steps after the checkpoint."""
        from torch.utils.tensorboard import SummaryWriter

        with self._place.opening(info) as goes_on:
            folder = self._place.path
            if _as_text(folder) != str(folder):
                msg = (
                    "TensorBoard writes to no folder with bytes in its name that are no text: "
                    f"{_as_text(folder)}; give TensorBoardLogger(folder)"
                )
                raise ConfigError(msg)
            _await_next_name(folder)
            purge_step = info.step + 1 if goes_on else None
            self._writer = SummaryWriter(
                str(folder),
                purge_step=purge_step,
                max_queue=_QUEUE,
                flush_secs=self._flush_s,
            )
            for path in folder.glob(f"{_PREFIX}*"):
                if not path.is_symlink():
                    path.chmod(0o600)  # the files have the program's arguments
            if not goes_on:
                self._write_facts(self._writer, info)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:  # noqa: ARG002
        if numbers:
            self._waiting.append((step, numbers))

    def flush(self) -> None:
        """Write scalars, a row as one event: one event per number costs a multiple."""
        waiting, self._waiting = self._waiting, []
        if self._writer is None or not waiting:
            return
        from tensorboard.compat.proto.summary_pb2 import (  # type: ignore[import-untyped]  # has no types
            Summary,
        )

        with showing_system_errors(self._place.path):  # the writing thread's errors are raised here
            for step, numbers in waiting:
                values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
                self._writer.file_writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]  # it is open

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:  # noqa: ARG002
        self.flush()
        if self._writer is not None:
            text = json.dumps(dict(facts), default=str)
            with showing_system_errors(self._place.path):
                self._writer.add_text(f"events/{kind}", text, step)

    def close(self, status: RunStatus) -> None:  # noqa: ARG002 - there is no place for it
        try:
            self.flush()
        finally:
            self._close_writer()

    def _close_writer(self) -> None:
        try:
            if self._writer is not None:
                with showing_system_errors(self._place.path):
                    self._writer.close()
        finally:
            self._writer = None
            self._place.close()

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        if self._writer is not None:
            with showing_system_errors(self._place.path):
                self._writer.flush()
        return self._place.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place.load_state_dict(state)

    @staticmethod
    def _write_facts(writer: "SummaryWriter", info: RunInfo) -> None:
        from torch.utils.tensorboard.summary import hparams

        chosen: dict[str, bool | float | str] = {}
        for name, value in info.hyperparameters.items():
            if isinstance(value, bool | int | float):
                chosen[name] = value
            else:
                chosen[name] = _as_text(value)
        if chosen:
            for summary in hparams(chosen, {}):
                writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # it is open
        texts = {
            "selection": f"```\n{info.selection}\n```",
            "environment": _table(info.environment),
            "versions": _table(info.versions),
        }
        for name, text in texts.items():
            writer.add_text(f"run/{name}", text, 0)


def _table(values: Mapping[str, str]) -> str:
    rows = [f"| {name} | {_as_text(value)} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _as_text(value: object) -> str:
    """Return a value as text that UTF-8 can encode; file names may have other bytes."""
    return str(value).encode(errors="backslashreplace").decode()


def _await_next_name(folder: Path) -> None:
    """Wait until a new file's name sorts after all others: it begins with the second, and readers sort."""
    while True:
        now = f"{_PREFIX}{int(time.time()):010d}"
        if not any(path.name.startswith(now) for path in folder.glob(f"{_PREFIX}*")):
            return
        time.sleep(_LOOK_S)
