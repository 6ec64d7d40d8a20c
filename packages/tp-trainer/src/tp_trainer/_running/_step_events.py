"""The events of optimizer steps, and of the steps that a custom loop's own code makes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.output import get_logger
from tp_core.plugins import RunView, Session
from tp_core.random import preserve_torch_rng_state, seed_of, seed_torch
from tp_core.state import hook_steps

from tp_trainer._running._callbacks import Events

log = get_logger("tp_trainer")


class OptimizerStepEvent:
    """Sends the event of optimizer steps, with random numbers that are the same on all ranks.

    What a callback draws there, such as noise for gradients, changes weights that ranks hold in common. The
    rank's own numbers, which dropout takes, continue after it.
    """

    def __init__(self, session: Session, events: Events) -> None:
        self._session, self._events = session, events
        self._last = 0, 0  # the step of the loop, and how many optimizers have stepped in it

    def send(self, run: RunView, grad_norm: Tensor) -> None:
        session = self._session
        if session.world_size == 1:
            self._events.send("on_optimizer_step", run, grad_norm)
            return
        step, number = self._last
        number = number + 1 if run.step == step else 0
        self._last = run.step, number
        with preserve_torch_rng_state([session.device]):
            seed_torch(seed_of((session.job.seed, *self._last, 3)), [session.device])
            self._events.send("on_optimizer_step", run, grad_norm)


class ManualStepEvents:
    """Sends the events of a custom loop: after each backward pass, and before each optimizer step.

    Attributes:
        has_step_event: Whether a callback has the event of optimizer steps.
        is_sent: Whether `Trainer.update` sends the event of this optimizer step, so that the hook must not.
    """

    def __init__(self, session: Session, loop: RunView, events: Events) -> None:
        self._session, self._loop, self._events = session, loop, events
        self.has_step_event = events.has("on_optimizer_step")
        self._step_event = OptimizerStepEvent(session, events)
        self.is_sent = False

    def backward_end(self) -> None:
        self._events.send("on_backward_end", self._loop)

    def optimizer_step(self, grad_norm: Tensor) -> None:
        self._step_event.send(self._loop, grad_norm)

    @contextmanager
    def watching(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Send the event of each optimizer step within the context, with the norm of its gradients.

        Collectives: as in `Session.grad_norm`, in each step, if a callback has the event.
        """
        watched = optimizers if self.has_step_event else ()
        handles = [h for optimizer in watched for h in hook_steps(optimizer, before=self._before_step)]
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


class UnusedGradients:
    """Counts the backward passes since the last step of a custom loop's optimizers.

    A checkpoint has no gradients. A loop that accumulates them by itself would lose those of before.
    """

    def __init__(self) -> None:
        self._passes = 0
        self._has_warned = False

    def note_backward(self) -> None:
        self._passes += 1

    @contextmanager
    def watching(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Begin again with each optimizer step within the context."""
        handles = [h for optimizer in optimizers for h in hook_steps(optimizer, after=self._after_step)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_step(self, *_: Any) -> None:
        self._passes = 0

    def warn(self, step: int) -> None:
        """Warn once if a checkpoint leaves out gradients that no optimizer has stepped with."""
        if not self._passes or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "the checkpoint of step %d has no gradients, and no optimizer stepped since the last backward "
            "pass: if the loop adds to what that left, a resumed run goes on without it. Accumulate by "
            "Trainer(accumulate=...) and loop.ends_step: a run is then saved between two optimizer steps",
            step,
        )
