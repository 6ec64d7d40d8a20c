"""The contract of callbacks, which a training run calls at its events."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # listing plugins must not import torch
    from pathlib import Path

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from tp_core.data import PreparedLoader


class RunView(Protocol):
    """A callback's view of a run: present values, and the few requests that it may make.

    There is one object for the whole run; its values change with the run.
    """

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs and before a resume too."""

    @property
    def epoch(self) -> int:
        """The present epoch, from 1."""

    @property
    def epochs(self) -> int | None:
        """The number of epochs; ``None`` where another limit ends the run."""

    @property
    def batches_done(self) -> int:
        """The number of batches of this epoch that are done."""

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
        """All of the run's models by name, as the user made them; in ``fit`` the name is "model"."""

    @property
    def optimizer(self) -> "Optimizer":
        """The optimizer; the first one where there are several.

        Raises:
            ConfigError: The loop was given no optimizer.
        """

    @property
    def optimizers(self) -> "Mapping[str, Optimizer]":
        """All of the run's optimizers by name; in ``fit`` the name is "optimizer"."""

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; ``None`` without one."""

    @property
    def loader(self) -> "PreparedLoader":
        """The prepared loader of the training data."""

    @property
    def device(self) -> "torch.device":
        """The device of this process."""

    @property
    def rank(self) -> int:
        """The rank of this process among all, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes that run the job."""

    @property
    def backend(self) -> str:
        """The name of the backend that runs the job."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and prints to the terminal."""

    def stop(self, reason: str) -> None:
        """End the run after this step, saved where it writes checkpoints; one rank may call it alone."""

    def save(self) -> None:
        """Request a checkpoint after this step; one rank may call it alone.

        Raises:
            ConfigError: The run writes no checkpoints.
        """

    def log(self, **numbers: "float | Tensor") -> None:
        """Pass numbers of this step to the loggers; tensors stay on their device until they are read."""


class Callback:
    """A base class of callbacks: override the events of interest; others cost nothing.

    Events come on every rank at the same steps. Code that runs on one rank alone must not use collectives:
    it would wait for the other ranks without an end.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_epoch_end(self, run):
        ...         print(run.epoch, run.metrics["loss"])
    """

    def on_setup(self, model: "nn.Module", optimizer: "Optimizer") -> None:
        """Called at the start of ``fit``, before a backend is chosen for the model.

        It may change the model and the optimizer, in place and alike on all ranks: for example put in place
        of layers what only one backend trains, and the new parameters into the optimizer's groups.
        """

    def on_fit_start(self, run: RunView) -> None:
        """Called once everything is prepared, and restored where the run is resumed."""

    def on_epoch_start(self, run: RunView) -> None:
        """Called before the first batch of an epoch; not where a resumed run continues within one."""

    def on_backward_end(self, run: RunView) -> None:
        """Called after each backward pass."""

    def on_optimizer_step(self, run: RunView, grad_norm: "Tensor") -> None:
        """Called before an optimizer step that will be made, with its gradients in place.

        In a custom loop each optimizer in ``state`` causes its own call. A step with a closure that computes
        the gradients, as with LBFGS, causes none.

        Args:
            run: The run.
            grad_norm: Their global norm before they were clipped: a scalar tensor, equal on all ranks.
        """

    def on_step_end(self, run: RunView) -> None:
        """Called after each optimizer step, also one that was skipped."""

    def on_validation_start(self, run: RunView) -> None:
        """Called before the first batch of a validation, with the model still in training mode."""

    def on_validation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Called after a validation, with its means and metrics; with none where a signal interrupted it."""

    def on_epoch_end(self, run: RunView) -> None:
        """Called after an epoch and its validation; ``run.metrics`` has the means of both."""

    def on_checkpoint_saved(self, run: RunView, path: "Path") -> None:
        """Called once a checkpoint is complete on disk."""

    def on_interruption(self, run: RunView, signal_number: int) -> None:
        """Called when a signal ends the run, after its state has been saved."""

    def on_exception(self, run: RunView, error: BaseException) -> None:
        """Called when an error ends the run, on the ranks that raise it."""

    def on_fit_end(self, run: RunView) -> None:
        """Called at the end of the run: after all epochs, another limit, or a stop."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` of the run that is resumed."""


@dataclass(frozen=True, slots=True)
class NamedCallback:
    """A callback that a plugin brings, for runs that name it or for all.

    Attributes:
        name: The name by which users choose it: ``fit(..., callbacks=["name"])``.
        help: One line about what it does.
        load: Returns a new one for a run that begins; heavy imports happen in here.
        joins: Whether it takes part in every run, named or not. If it fails, the run leaves it out and
            logs its name; the failure of one that a script names ends the run.

    Example:
        >>> NamedCallback("energy", "Measures the joules of a run", lambda: Callback()).joins
        False
    """

    name: str
    help: str
    load: Callable[[], Callback]
    joins: bool = False
