"""The state of a run as one object, which is captured into checkpoints and restored from them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError
from tp_core.plugins import Session
from tp_core.state import StoredTensors, collect_state, restore_state, to_json

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._running._history import EpochRecord
from tp_trainer._running._user_state import Tensors, UserState
from tp_trainer._steps._meter import Meter, added_states, empty_state
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import LossScaler

log = logging.getLogger("tp_trainer")


@dataclass(frozen=True, slots=True)
class Trained:
    """Models, optimizers and schedulers of a run, by name.

    Attributes:
        models: The prepared models.
        optimizers: The prepared optimizers.
        schedulers: The learning-rate schedulers.
        scaler: Scales the loss, or ``None``.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, Any]
    scaler: LossScaler | None = None


class RunState:
    """The state of a run: what it trains, what it saves besides, and its position.

    Args:
        session: The session of the run.
        trained: Models, optimizers and schedulers.
        user_state: Further objects that it saves.
        train: The prepared loader.
        optimizer_step: Makes the optimizer steps of ``fit``; ``None`` in a loop of the user's own.

    Attributes:
        trained: Models, optimizers and schedulers.
        user_state: Further objects that the run saves.
        step: Optimizer steps done so far.
        epoch: The current or next epoch, from 1.
        first: The batches of this epoch that were done before this call.
        seconds: The seconds that they took.
        meter_state: The sums over them; ``None`` without any.
        logged: This rank's sums of losses and weights when the mean loss was last logged, or ``None``.
        weighs: Whether the step returns a weight; ``None`` before the first step.
        records: The records of the past epochs.
        validated_at: The optimizer step of the last validation between two steps.
        metrics: The newest means.
    """

    def __init__(
        self,
        session: Session,
        trained: Trained,
        user_state: UserState,
        train: PreparedLoader,
        optimizer_step: OptimizerStep | None = None,
    ) -> None:
        self._session = session
        self.trained = trained
        self.user_state = user_state
        self._train = train
        self._optimizer_step = optimizer_step
        self.step = 0
        self.epoch = 1
        self.first = 0
        self.seconds = 0.0
        self.meter_state: dict[str, Any] | None = None
        self.logged: tuple[float, float] | None = None
        self.weighs: bool | None = None
        self.records: list[EpochRecord] = []
        self.validated_at = 0
        self.metrics: dict[str, float] = {}

    @property
    def plain_models(self) -> dict[str, nn.Module]:
        """The user's own modules, by name."""
        return {name: self._session.unwrap(model) for name, model in self.trained.models.items()}

    def _whole_model(self) -> nn.Module:
        """Return the only model, or one module with all models as children, under their names."""
        models = self.plain_models
        if len(models) == 1:
            return next(iter(models.values()))
        whole = nn.Module()
        whole._modules.update(models)
        return whole

    def _optimizers(self) -> Optimizer | Mapping[str, Optimizer]:
        optimizers = self.trained.optimizers
        return next(iter(optimizers.values())) if len(optimizers) == 1 else optimizers

    def check(self, *, replay: bool) -> None:
        """Make sure that the run can be saved, before training costs anything.

        Args:
            replay: Whether a resumed run may read batches again to reach its position.

        Raises:
            LoaderError: The loader cannot be put back at a position.
            StateError: A state, or the loader's position, has values that checkpoints cannot hold.

        Collectives: as in :meth:`capture`.
        """
        if not replay:
            self._train.check_position()
        _, common, own = self.capture(0, None)
        to_json("the state of the run", (common, own))

    def capture(self, done: int, meter: Meter | None) -> tuple[Tensors, dict[str, Any], dict[str, Any]]:
        """Return the tensors (not copied), the values common to all ranks, and this rank's own values.

        Args:
            done: How many batches of the epoch are done.
            meter: The sums over them; ``None`` where the epoch has not begun.

        Collectives: as in `UserState.capture`.
        """
        session, train, trained, step = self._session, self._train, self.trained, self._optimizer_step
        tensors = collect_state(self._whole_model(), self._optimizers(), cut=session.as_slice)
        captured = self.user_state.capture()
        if meter is not None and done:
            position = train.state_dict(batches=done)
        else:
            position = train.state_dict(batches=0) | {"epoch": train.next_epoch, "samples": 0}
        common = {
            "epoch": self.epoch,
            "seconds": self.seconds,
            "updates": {
                "count": self.step,
                "skipped": 0 if step is None else step.skipped,
                "unit": None if step is None else step.unit,
            },
            "schedulers": {name: _state_of(one) for name, one in trained.schedulers.items()},
            "scaler": None if trained.scaler is None else trained.scaler.state_dict(),
            "position": position,
            "records": [record.to_dict() for record in self.records],
            "metrics": self.metrics,
            "validated_at": self.validated_at,
            "world_size": session.world_size,
            "state": captured.common,
        }
        own = {
            "data_rank": session.data_rank,
            "stream": position.pop("stream", None),  # each rank has its own position in its share
            "generators": generators.capture(session.job.devices),
            "meter": None if meter is None or not done else meter.state_dict(),
            "logged": self.logged,
            "state": captured.own,
        }
        return {**tensors, **captured.tensors}, common, own

    def restore(
        self, path: Path, stored: tuple[StoredTensors, dict[str, Any], list[dict[str, Any]]], *, replay: bool
    ) -> None:
        """Restore the run from a checkpoint.

        The random generators come last: everything before may draw from them.

        Args:
            path: The checkpoint, for messages.
            stored: Its tensors, the values common to all ranks, and the values of each rank.
            replay: Whether a loader without positions may read the batches before this one again.

        Raises:
            ConfigError: The run has a scheduler, or saves something, that the checkpoint lacks, or the other
                way round.
            StateError: The checkpoint does not fit the models or the optimizers.
            LoaderError: The loader cannot be brought to the position.
        """
        tensors, common, ranks = stored
        trained, step = self.trained, self._optimizer_step
        schedulers = _schedulers_in(path, common, trained.schedulers)
        restore_state(
            self._whole_model(),
            self._optimizers(),
            tensors,
            cut=self._session.as_slice,
            same_groups=bool(trained.schedulers),
        )
        for name, scheduler in trained.schedulers.items():
            _load_state_of(scheduler, schedulers[name])
        if trained.scaler is not None and common["scaler"] is not None:
            trained.scaler.load_state_dict(common["scaler"])
        updates = common["updates"]
        self.step = updates["count"]
        if step is not None:
            step.count, step.skipped, step.unit = updates["count"], updates["skipped"], updates["unit"]
        self.records = [EpochRecord(**record) for record in common["records"]]
        self.metrics, self.validated_at = common.get("metrics", {}), common.get("validated_at", 0)
        self.epoch, self.seconds = common["epoch"], common["seconds"]
        self.user_state.restore(
            path, tensors, common.get("state", {}), [mine.get("state", {}) for mine in ranks]
        )
        position = common["position"] | {"stream": self._stream_in(ranks)}
        self.first = self._train.load_state_dict(position, replay=replay)
        self._restore_own(path, common, ranks)

    def _stream_in(self, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the position of this rank's share of a stream, or of data rank 0's if it had none."""
        by_rank = {mine["data_rank"]: mine.get("stream") for mine in ranks}
        return by_rank.get(self._session.data_rank, by_rank.get(0))

    def _restore_own(self, path: Path, common: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Restore this rank's own sums and random generators."""
        session = self._session
        # Not the world size alone: of two ranks, each may read half the data, or both all of it (two stages).
        shares = 1 + max(mine["data_rank"] for mine in ranks)
        if (common["world_size"], shares) == (session.world_size, session.data_size):
            mine = ranks[session.rank]
            self.meter_state, logged = mine["meter"], mine.get("logged")
            self.logged = None if logged is None else (logged[0], logged[1])
            generators.restore(mine["generators"])
            return
        self.meter_state = _share_of_sums(session.data_rank, ranks)
        log.warning(
            "%s is of %d ranks, and these are %d (with %d and %d shares of the data): model, optimizer and "
            "position are those of the checkpoint, the random generators are seeded anew",
            path,
            common["world_size"],
            session.world_size,
            shares,
            session.data_size,
        )
        generators.reseed(common["position"]["seed"], self.step, session.data_rank)


def _schedulers_in(path: Path, common: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the schedulers that the run has.

    Raises:
        ConfigError: The run and the checkpoint have different schedulers.
    """
    saved: dict[str, Any] = common.get("schedulers", {})
    if common.get("scheduler") is not None:  # written by a version with a single scheduler
        saved = {"scheduler": common["scheduler"]}
    if len(saved) == len(wanted) == 1:  # whatever they are called
        return dict(zip(wanted, saved.values(), strict=True))
    if bool(saved) != bool(wanted):
        has, lacks = ("the run", "the checkpoint") if wanted else ("the checkpoint", "the run")
        msg = f"{path}: {has} has a scheduler and {lacks} has none; resume with what the run had"
        raise ConfigError(msg)
    if saved.keys() != wanted.keys():
        msg = (
            f"{path} is of a run with the schedulers {sorted(saved)}, and this one has {sorted(wanted)}; "
            "resume with what the run had"
        )
        raise ConfigError(msg)
    return saved


def _share_of_sums(data_rank: int, ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a rank's part of all ranks' sums: data rank 0 takes everything, the others nothing."""
    # One per data rank: ranks with the same data have each counted all of it.
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
