"""What a run shows of itself: to callbacks, and to loops of the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError
from tp_core.plugins import Session

from tp_trainer._running._history import History
from tp_trainer._running._limits import Limits
from tp_trainer._running._state import RunState

__all__ = ["RunFacts"]

T = TypeVar("T")


class RunFacts:
    """How far a run is, what it trains, and where.

    Args:
        session: Where it runs.
        state: What checkpoints save of it.
        limits: How long it goes on.
        steps: How many batches make an epoch.
        accumulate: How many batches make an optimizer step.
        folder: Where its checkpoints are; ``None`` for a run without any.
    """

    def __init__(
        self,
        session: Session,
        state: RunState,
        limits: Limits,
        *,
        steps: int,
        accumulate: int,
        folder: Path | None,
    ) -> None:
        self._session, self._run_state, self._limits = session, state, limits
        self._steps, self._accumulate, self._folder = steps, accumulate, folder
        self._base = 0  # optimizer steps before this epoch
        self._done = 0

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs and before a resume too."""
        done, accumulate = self._done, self._accumulate
        return self._base + (done // accumulate if done < self._steps else -(-done // accumulate))

    @property
    def epoch(self) -> int:
        """The epoch that runs, from 1."""
        return self._run_state.epoch

    @property
    def epochs(self) -> int | None:
        """How many there will be; ``None`` where another limit ends the run."""
        return self._limits.epochs

    @property
    def steps_per_epoch(self) -> int:
        """How many batches make an epoch."""
        return self._steps

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are done."""
        return self._done

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means, those of the last epoch's training and ``"val_..."`` of the last validation."""
        return self._run_state.metrics

    @property
    def history(self) -> History:
        """The records of the epochs that are over."""
        return History(tuple(self._run_state.records), self._folder)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """All of the run's models by name, as the user made them."""
        return self._run_state.plain_models

    @property
    def model(self) -> nn.Module:
        """The user's own module; the first one where there are several.

        Raises:
            ConfigError: The loop was given no model.
        """
        return _first("model", self.models)

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """All of the run's optimizers by name."""
        return self._run_state.trained.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; the first one where there are several.

        Raises:
            ConfigError: The loop was given no optimizer.
        """
        return _first("optimizer", self.optimizers)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; the first one where there are several, ``None`` without one."""
        return next(iter(self._run_state.trained.schedulers.values()), None)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._session.device

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return self._session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self._session.is_main


def _first(what: str, found: Mapping[str, T]) -> T:
    if not found:
        msg = f"the loop was given no {what}: name it in state={{...}}"
        raise ConfigError(msg)
    return next(iter(found.values()))
