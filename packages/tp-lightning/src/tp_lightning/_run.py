"""A module at work: what the trainer, its training and evaluation, and the module's own calls share."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from tp_core.plugins import Session
from tp_trainer import Loop
from tp_trainer import Trainer as OwnTrainer

from tp_lightning._arguments import BatchArguments, GradientArguments
from tp_lightning._module import call
from tp_lightning._optimizers import LearningRateSchedule
from tp_lightning._results import LoggedResults


@dataclass(slots=True, eq=False)
class ModuleRun:
    """A module at work, on a trainer of tp.

    Attributes:
        trainer: What hooks of callbacks get.
        own: The trainer of tp.
        callbacks: Objects with Lightning's hooks.
        batches: How many batches each stage takes.
        gradients: What becomes of gradients.
    """

    trainer: Any
    own: OwnTrainer
    callbacks: list[Any]
    batches: BatchArguments
    gradients: GradientArguments

    # The module of the call at hand, and what was prepared of it.
    model: Any = None
    datamodule: Any = None
    prepared: nn.Module | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    schedules: list[LearningRateSchedule] = field(default_factory=list)

    # Where it is.
    loop: Loop | None = None
    global_step: int = 0
    training: bool = False
    validating: bool = False
    testing: bool = False
    predicting: bool = False
    sanity_checking: bool = False
    results: LoggedResults = field(default_factory=LoggedResults)

    @property
    def session(self) -> Session:
        """The session of tp."""
        return self.own.session

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0."""
        if self.loop is None:
            return 0
        return self.loop.epoch - 1

    @property
    def is_automatic(self) -> bool:
        """Whether the trainer steps the optimizer, rather than the module."""
        return bool(getattr(self.model, "automatic_optimization", True))

    def hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks and of the module, as far as they have it."""
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self.trainer, self.model, *args)
        return call(self.model, name, *args)
