"""What a run saves, when and where: Lightning's ``ModelCheckpoint`` in tp's terms, the module's own state."""

import itertools
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tp_core.errors import ConfigError
from tp_trainer import Checkpoints, Validation, find_checkpoint

from tp_lightning._module import call
from tp_lightning._run import ModuleRun


@dataclass(frozen=True, slots=True)
class SavingArguments:
    """Where and when a run saves.

    Attributes:
        checkpoint: As for ``fit`` of tp's trainer; ``None`` saves nothing.
        callback: Lightning's ``ModelCheckpoint``, if one was given.
    """

    checkpoint: Any
    callback: Any

    @classmethod
    def parse(
        cls, checkpoint: Any, callback: Any, default_root_dir: Any, enable_checkpointing: bool | None
    ) -> "SavingArguments":
        """Return them of Lightning's arguments.

        Raises:
            ConfigError: They contradict each other.
        """
        if callback is None:
            of_callback = None
        else:
            of_callback = checkpoints_of(callback)
        if of_callback and (checkpoint is not None or enable_checkpointing is False):
            if checkpoint is None:
                argument = "enable_checkpointing=False"
            else:
                argument = "checkpoint="
            msg = f"{argument} and a ModelCheckpoint contradict each other; give one of them"
            raise ConfigError(msg)
        if enable_checkpointing is False:
            return cls(None, callback)
        chosen = checkpoint or of_callback
        if not chosen and default_root_dir:
            chosen = _next_version(default_root_dir)
        return cls(chosen, callback)

    def due_after(self, validating: Validation | None) -> Any:
        """Return when to save: for Lightning's callback after each validation, those within epochs too."""
        checkpoint: Any = self.checkpoint
        every = None if validating is None else validating.every_steps
        is_lightnings = self.callback is not None and isinstance(checkpoint, Checkpoints)
        if every is None or not is_lightnings or checkpoint.every_epochs is None:
            return checkpoint
        if checkpoint.every_epochs > 1:
            msg = (
                f"ModelCheckpoint(every_n_epochs={checkpoint.every_epochs}) with validations within an epoch "
                "is not here; with tp, leave every_n_epochs out, to save after each validation"
            )
            raise ConfigError(msg)
        return replace(checkpoint, every_steps=every)

    def find(self, path: Any) -> Any:
        """Return a path that was given for weights; for "best" and "last" the one of a checkpoint of the run.

        Raises:
            ConfigError: The run saves nothing.
        """
        if path not in ("best", "last"):
            return path
        checkpoint = self.checkpoint
        if checkpoint is None:
            msg = f"ckpt_path={path!r} needs a run's folder: Trainer(checkpoint='run')"
            raise ConfigError(msg)
        folder: Any = getattr(checkpoint, "folder", checkpoint)
        if path == "best":
            best = getattr(checkpoint, "best", None)
        else:
            best = None
        return find_checkpoint(folder, best=best, mode=getattr(checkpoint, "mode", "min"))

    def name_newest(self) -> None:
        """Note in Lightning's callback where the best and the newest checkpoint are."""
        theirs = self.callback
        ours = self.checkpoint
        if theirs is None or not isinstance(ours, Checkpoints):
            return
        newest = find_checkpoint(ours.folder)
        theirs.last_model_path = theirs.best_model_path = str(newest)
        if ours.best is not None:
            with suppress(ConfigError):  # the metric was always NaN: no checkpoint is the best
                best = find_checkpoint(ours.folder, best=ours.best, mode=ours.mode)
                theirs.best_model_path = str(best)
                metrics = json.loads((best / "manifest.json").read_text(encoding="utf-8"))["metrics"]
                theirs.best_model_score = torch.tensor(metrics[ours.best])


def checkpoints_of(theirs: Any) -> Checkpoints | None:
    if theirs.save_top_k == 0 and not theirs.save_last:
        return None
    interval = theirs._train_time_interval  # Lightning has the times in private fields alone; 0 is never
    keep = sys.maxsize if theirs.save_top_k == -1 else 1
    best = theirs.monitor if theirs.save_top_k else None
    return Checkpoints(
        theirs.dirpath or "checkpoints",
        every_steps=theirs._every_n_train_steps or None,
        every_s=interval and interval.total_seconds(),
        every_epochs=theirs._every_n_epochs or None,
        keep=keep,
        best=best,
        mode=theirs.mode,
    )


def _next_version(root: Any) -> Path:
    """Return the first folder "version_N" that does not exist."""
    folder = Path(root)
    return next(path for i in itertools.count() if not (path := folder / f"version_{i}").exists())


class ModuleState:
    """What a module, its datamodule and callbacks keep in checkpoints beside weights."""

    def __init__(self, run: ModuleRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        module: dict[str, Any] = {}
        call(self._run.model, "on_save_checkpoint", module)
        data = call(self._run.datamodule, "state_dict") or {}
        callbacks = [call(callback, "state_dict") or {} for callback in self._run.callbacks]
        return {"module": module, "data": data, "callbacks": callbacks, "step": self._run.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        call(self._run.model, "on_load_checkpoint", dict(state["module"]))
        if state["data"]:
            call(self._run.datamodule, "load_state_dict", state["data"])
        for callback, saved in zip(self._run.callbacks, state["callbacks"], strict=True):
            if saved:
                callback.load_state_dict(saved)
        self._run.global_step = state["step"]
