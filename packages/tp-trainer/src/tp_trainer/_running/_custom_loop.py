"""Hooks of a custom loop: its validation, and the events of its steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.plugins import RunView, Session

from tp_trainer._metrics._evaluation import numbers_in
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._running._callbacks import Events
from tp_trainer._running._loop import LoopHooks


class CustomLoopHooks(LoopHooks):
    """The hooks of a custom loop, in which the user's code makes the steps.

    Args:
        session: The session that runs the steps.
        events: The run's events.
        validate: The user's function; called if the run has a validation.
        evaluating: Returns a context in which a signal ends the trainer's evaluations at a boundary.
        sending: Returns a context in which the trainer sends the events of the steps that it makes.
    """

    def __init__(
        self,
        session: Session,
        events: Events,
        validate: Callable[[], Mapping[str, float]],
        *,
        evaluating: Callable[[StepBoundaries | None], AbstractContextManager[None]],
        sending: Callable[["ManualStepEvents"], AbstractContextManager[None]],
    ) -> None:
        self._session, self._events, self._validate = session, events, validate
        self._evaluating, self._sending = evaluating, sending

    def validate(
        self,
        boundaries: StepBoundaries | None,
        max_batches: int | None,  # noqa: ARG002 - the user's function has its own loaders
    ) -> Mapping[str, float]:
        """Return the numbers of the user's validation. A signal ends its evaluations early."""
        with self._evaluating(boundaries):
            return numbers_in(self._validate())

    @contextmanager
    def while_open(self, loop: RunView) -> Iterator[None]:
        """Send the events of the steps made within the context, if a callback has them."""
        if not self._events.has("on_backward_end") and not self._events.has("on_optimizer_step"):
            yield
            return
        events = ManualStepEvents(self._session, loop, self._events)
        with events.watching(loop.optimizers.values()), self._sending(events):
            yield


class ManualStepEvents:
    """Sends the events of a custom loop: after each backward pass, and before each optimizer step.

    Args:
        session: The session that runs the steps.
        loop: The loop that callbacks get.
        events: The run's events.

    Attributes:
        has_step_event: Whether a callback has the event of optimizer steps.
        is_sent: Whether `Trainer.update` sends the event of this optimizer step, so that the hook must not.
    """

    def __init__(self, session: Session, loop: RunView, events: Events) -> None:
        self._session, self._loop, self._events = session, loop, events
        self.has_step_event = events.has("on_optimizer_step")
        self.is_sent = False

    def backward_end(self) -> None:
        """Send the event after a backward pass."""
        self._events.send("on_backward_end", self._loop)

    def optimizer_step(self, grad_norm: Tensor) -> None:
        """Send the event before an optimizer step."""
        self._events.send("on_optimizer_step", self._loop, grad_norm)

    @contextmanager
    def watching(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Send the event of each optimizer step within the context, with the norm of its gradients.

        Collectives: as in `Session.grad_norm`, in each step, if a callback has the event.
        """
        watched = optimizers if self.has_step_event else ()
        handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # A closure computes the gradients within the step, maybe several times: there is no norm yet.
        takes_closure = any(callable(value) for value in (*arguments[1:], options.get("closure")))
        if self.is_sent or takes_closure:
            return
        trained = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
        self.optimizer_step(self._session.grad_norm(trained))
