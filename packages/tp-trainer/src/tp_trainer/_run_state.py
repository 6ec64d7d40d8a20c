"""What a run is made of besides tensors, as plain values, and how it goes on from them."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_core.errors import ConfigError

from tp_trainer._checkpoint import Keeper, generators, optimizer_values, restore
from tp_trainer._metrics import Meter, added_states, empty_state
from tp_trainer._progress import EpochRecord

if TYPE_CHECKING:
    from tp_trainer._run import Run

__all__ = ["capture", "resume_run"]

log = logging.getLogger("tp_trainer")


def capture(run: "Run", done: int, meter: Meter | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what all ranks have in common, and what is this rank's own.

    Args:
        run: The run.
        done: How many batches of its epoch are done.
        meter: What they came to; ``None`` where the epoch has not begun.
    """
    session, train = run.session, run.train
    if meter is not None and done:
        position = train.state_dict(batches=done)
    else:
        position = train.state_dict(batches=0) | {"epoch": train.next_epoch, "samples": 0}
    state = {
        "epoch": run.epoch,
        "seconds": run.seconds,
        "updates": {"count": run.update.count, "skipped": run.update.skipped},
        "optimizer": optimizer_values(run.optimizer),
        "scheduler": None if run.scheduler is None else _state_of(run.scheduler),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "position": position,
        "records": [asdict(record) for record in run.records],
        "world_size": session.world_size,
    }
    mine = {
        "data_rank": session.data_rank,
        "generators": generators.capture(session.job.devices),
        "meter": None if meter is None or not done else meter.state_dict(),
    }
    return state, mine


def resume_run(run: "Run", keeper: Keeper, path: Path) -> None:
    """Take everything from a checkpoint; the random generators last, for nothing to disturb them.

    Raises:
        ConfigError: The run has a scheduler and the checkpoint has none, or the other way round.
        StateError: It does not fit the model or the optimizer.
        LoaderError: The loader cannot be brought to the position.
    """
    session = run.session
    tensors, state, ranks = keeper.read(path)
    if (run.scheduler is None) != (state["scheduler"] is None):
        has, lacks = ("the run", "the checkpoint") if run.scheduler else ("the checkpoint", "the run")
        msg = f"{path}: {has} has a scheduler and {lacks} has none; resume with what the run had"
        raise ConfigError(msg)
    restore(session, run.model, run.optimizer, state["optimizer"], tensors)
    if run.scheduler is not None:
        _load_state_of(run.scheduler, state["scheduler"])
    if run.scaler is not None and state["scaler"] is not None:
        run.scaler.load_state_dict(state["scaler"])
    run.update.count = state["updates"]["count"]
    run.update.skipped = state["updates"]["skipped"]
    run.records = [EpochRecord(**record) for record in state["records"]]
    run.epoch, run.seconds = state["epoch"], state["seconds"]
    run.first = run.train.load_state_dict(state["position"], replay=keeper.settings.replay)
    if run.val is not None:
        run.val.set_epoch(run.epoch - 1)
    keeper.continues(path, run.update.count)
    if state["world_size"] == session.world_size:
        run.meter_state = ranks[session.rank]["meter"]
        generators.restore(ranks[session.rank]["generators"])
    else:
        run.meter_state = _share_of_sums(session.data_rank, ranks)
        log.warning(
            "%s is of %d ranks, and these are %d: model, optimizer and position are those of the "
            "checkpoint, the random generators are seeded anew",
            path,
            state["world_size"],
            session.world_size,
        )
        generators.reseed(state["position"]["seed"], run.update.count, session.data_rank)
    run.reporter.say(f"resumed from {path}: epoch {run.epoch}, {run.first} batches of it done")


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
