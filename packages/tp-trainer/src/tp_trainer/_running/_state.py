"""The state of a run as one object, which checkpoints capture and restore."""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import PreparedLoader, TensorSlice
from tp_core.state import StoredTensors, collect_state, restore_state, to_json

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._running._loop import Scheduler
from tp_trainer._running._progress import EpochRecord
from tp_trainer._steps._meter import Meter, added_states, empty_state
from tp_trainer._steps._optimizer_step import OptimizerStep

__all__ = ["RunState"]

log = logging.getLogger("tp_trainer")


class RunState:
    """The state of a run: its model and optimizer, and how far it is.

    Args:
        optimizer_step: Makes the optimizer steps, of a model and an optimizer.
        train: The prepared loader.
        scheduler: Moves the learning rate, or ``None``.

    Attributes:
        epoch: The one that runs, or is the next, from 1.
        first: How many batches of it were done before this call of ``fit``.
        seconds: How long they took.
        meter_state: The sums over them; ``None`` where there are none.
        weighs: Whether the step returns a weight; ``None`` before the first.
        records: The records of the epochs before.
    """

    def __init__(
        self, optimizer_step: OptimizerStep, train: PreparedLoader, scheduler: Scheduler | None
    ) -> None:
        self._optimizer_step = optimizer_step
        self._train = train
        self._scheduler = scheduler
        self.epoch = 1
        self.first = 0
        self.seconds = 0.0
        self.meter_state: dict[str, Any] | None = None
        self.weighs: bool | None = None
        self.records: list[EpochRecord] = []

    def check(self) -> None:
        """Make sure that the run can be saved, before it costs anything to learn that it cannot.

        Raises:
            StateError: The model's or the scheduler's state, or the loader's position, holds what
                no checkpoint does.
        """
        self.tensors()
        to_json("the state of the run", self.capture(0, None))

    def tensors(self) -> dict[str, Tensor | TensorSlice]:
        """Return the tensors of the model and the optimizer: no copies."""
        step = self._optimizer_step
        return collect_state(step.session.unwrap(step.model), step.optimizer, cut=step.session.as_slice)

    def capture(self, done: int, meter: Meter | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is not a tensor: the values that all ranks have in common, and this rank's own.

        Args:
            done: How many batches of the epoch are done.
            meter: The sums over them; ``None`` where the epoch has not begun.
        """
        step, train, scheduler = self._optimizer_step, self._train, self._scheduler
        session, scaler = step.session, step.scaler
        if meter is not None and done:
            position = train.state_dict(batches=done)
        else:
            position = train.state_dict(batches=0) | {"epoch": train.next_epoch, "samples": 0}
        common = {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "updates": {"count": step.count, "skipped": step.skipped, "unit": step.unit},
            "scheduler": None if scheduler is None else _state_of(scheduler),
            "scaler": None if scaler is None else scaler.state_dict(),
            "position": position,
            "records": [asdict(record) for record in self.records],
            "world_size": session.world_size,
        }
        own = {
            "data_rank": session.data_rank,
            "generators": generators.capture(session.job.devices),
            "meter": None if meter is None or not done else meter.state_dict(),
        }
        return common, own

    def restore(
        self, path: Path, stored: tuple[StoredTensors, dict[str, Any], list[dict[str, Any]]], *, replay: bool
    ) -> None:
        """Go on from a checkpoint; the random generators come last, for nothing to disturb them.

        Args:
            path: The checkpoint, for messages.
            stored: Its tensors, the values that all ranks had in common, and those of each rank.
            replay: Whether a loader that cannot be put at a position may read what is before it again.

        Raises:
            ConfigError: The run has a scheduler and the checkpoint has none, or the other way round.
            StateError: The checkpoint does not fit the model or the optimizer.
            LoaderError: The loader cannot be brought to the position.
        """
        tensors, common, ranks = stored
        step, scheduler = self._optimizer_step, self._scheduler
        session = step.session
        if (scheduler is None) != (common["scheduler"] is None):
            has, lacks = ("the run", "the checkpoint") if scheduler else ("the checkpoint", "the run")
            msg = f"{path}: {has} has a scheduler and {lacks} has none; resume with what the run had"
            raise ConfigError(msg)
        restore_state(
            session.unwrap(step.model),
            step.optimizer,
            tensors,
            cut=session.as_slice,
            same_groups=scheduler is not None,
        )
        if scheduler is not None:
            _load_state_of(scheduler, common["scheduler"])
        if step.scaler is not None and common["scaler"] is not None:
            step.scaler.load_state_dict(common["scaler"])
        updates = common["updates"]
        step.count, step.skipped, step.unit = updates["count"], updates["skipped"], updates["unit"]
        self.records = [EpochRecord(**record) for record in common["records"]]
        self.epoch, self.seconds = common["epoch"], common["seconds"]
        self.first = self._train.load_state_dict(common["position"], replay=replay)
        self._restore_own(path, common, ranks)

    def _restore_own(self, path: Path, common: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Take what is this rank's own: its sums and its random generators."""
        session = self._optimizer_step.session
        if common["world_size"] == session.world_size:
            self.meter_state = ranks[session.rank]["meter"]
            generators.restore(ranks[session.rank]["generators"])
            return
        self.meter_state = _share_of_sums(session.data_rank, ranks)
        log.warning(
            "%s is of %d ranks, and these are %d: model, optimizer and position are those of the "
            "checkpoint, the random generators are seeded anew",
            path,
            common["world_size"],
            session.world_size,
        )
        generators.reseed(common["position"]["seed"], self._optimizer_step.count, session.data_rank)


def _share_of_sums(data_rank: int, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a rank counts of what other ranks had counted: the first one all, the others none."""
    # Ranks that share their data have each counted all of it.
    shares = {mine["data_rank"]: mine["meter"] for mine in ranks if mine["meter"] is not None}
    states = list(shares.values())
    if not states:
        return None
    return added_states(states) if data_rank == 0 else empty_state(states[0])


def _state_of(scheduler: Any) -> Any:
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}


def _load_state_of(scheduler: Any, state: Any) -> None:
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(state)
