"""The contract of what takes part in a run of training: it is called at the run's events."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # listing plugins must not import torch
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tp_core._data._loader import PreparedLoader


class RunView(Protocol):
    """What a callback sees of a run, and the few things that it may ask for.

    There is one for the whole run, whose values are those of the moment.
    """

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs and before a resume too."""

    @property
    def epoch(self) -> int:
        """The epoch that runs, from 1."""

    @property
    def epochs(self) -> int | None:
        """How many there will be; ``None`` where nothing but another limit ends the run."""

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are done."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means, those of the last epoch's training and ``"val_..."`` of the last validation."""

    @property
    def model(self) -> "nn.Module":
        """The user's own module; the first one where there are several.

        Raises:
            ConfigError: The loop was given no model.
        """

    @property
    def models(self) -> "Mapping[str, nn.Module]":
        """All of the run's models by name, as the user made them; ``fit`` calls its one "model"."""

    @property
    def optimizer(self) -> "Optimizer":
        """The optimizer; the first one where there are several.

        Raises:
            ConfigError: The loop was given no optimizer.
        """

    @property
    def optimizers(self) -> "Mapping[str, Optimizer]":
        """All of the run's optimizers by name; ``fit`` calls its one "optimizer"."""

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; ``None`` without one."""

    @property
    def loader(self) -> "PreparedLoader":
        """The prepared loader that is trained on."""

    @property
    def device(self) -> "torch.device":
        """Where this process computes."""

    @property
    def rank(self) -> int:
        """This process among all, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes run the job."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""

    def stop(self, reason: str) -> None:
        """End the run after this step, saved where checkpoints are written; one rank's word is enough."""

    def save(self) -> None:
        """Have a checkpoint written after this step; one rank's word is enough.

        Raises:
            ConfigError: The run writes no checkpoints.
        """

    def log(self, **numbers: "float | Tensor") -> None:
        """Hand numbers of this step to the loggers; tensors stay on their device until they are read."""


class Callback:
    """Takes part in a run: override what is of interest; what is not overridden costs nothing.

    Events come on every rank at the same steps. What a method does on one rank alone must not need the
    others: no collectives there.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_epoch_end(self, run):
        ...         print(run.epoch, run.metrics["loss"])
    """

    def on_fit_start(self, run: RunView) -> None:
        """Called once everything is prepared, and restored where the run is resumed."""

    def on_epoch_start(self, run: RunView) -> None:
        """Called before the first batch of an epoch; not where a resumed run goes on within one."""

    def on_backward_end(self, run: RunView) -> None:
        """Called after each backward pass."""

    def on_optimizer_step(self, run: RunView, grad_norm: "Tensor") -> None:
        """Called before an optimizer step that will be made, with its gradients in place.

        In a custom loop each optimizer in ``state`` makes its own. A step whose closure makes the
        gradients, as LBFGS's does, is left out.

        Args:
            run: The run.
            grad_norm: Their global norm before they were clipped: a scalar tensor, equal on all ranks.
        """

    def on_step_end(self, run: RunView) -> None:
        """Called after each optimizer step, also one that was left out."""

    def on_validation_start(self, run: RunView) -> None:
        """Called before the first batch of a validation, with the model still in training mode."""

    def on_validation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Called after a validation, with its means and metrics; with none where a signal cut it short."""

    def on_epoch_end(self, run: RunView) -> None:
        """Called after an epoch and its validation; ``run.metrics`` has the means of both."""

    def on_checkpoint_saved(self, run: RunView, path: "Path") -> None:
        """Called once a checkpoint is whole on disk."""

    def on_interruption(self, run: RunView, signal_number: int) -> None:
        """Called where a signal ends the run, after its state has been saved."""

    def on_exception(self, run: RunView, error: BaseException) -> None:
        """Called where an error ends the run, on the ranks that it is raised on."""

    def on_fit_end(self, run: RunView) -> None:
        """Called where the run has come to its end: all epochs, another limit, or a stop."""

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints keep of this callback: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned in the run that is resumed."""


@dataclass(frozen=True, slots=True)
class NamedCallback:
    """A callback that a plugin brings, for runs that name it or for all.

    Attributes:
        name: What users write to have it in a run: ``fit(..., callbacks=["name"])``.
        help: One line that says what it does.
        load: Returns a new one for a run that begins; what is heavy is imported in here.
        joins: Whether it takes part in every run, named or not. One that fails is then left out and
            named in the log, where one that a script names ends the run.

    Example:
        >>> NamedCallback("energy", "Measures the joules of a run", lambda: Callback()).joins
        False
    """

    name: str
    help: str
    load: Callable[[], Callback]
    joins: bool = False
