"""The events of steps that a loop of the user's own makes, by `Trainer.backward` and its optimizers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.plugins import RunView, Session

from tp_trainer._running._events import Events

__all__ = ["OwnStepEvents"]


class OwnStepEvents:
    """Tells the callbacks of a loop of its backward passes, and of the optimizer steps before they are made.

    Args:
        session: Where the steps run.
        loop: Whose callbacks are told.
        events: Sends them.

    Attributes:
        tells_steps: Whether somebody wants to know of optimizer steps.
        is_told: Whether whoever makes the optimizer step at hand tells of it, so that its hook need not.
    """

    def __init__(self, session: Session, loop: RunView, events: Events) -> None:
        self._session, self._loop, self._events = session, loop, events
        self.tells_steps = events.has("on_optimizer_step")
        self.is_told = False

    def backward_end(self) -> None:
        """Tell of a backward pass that was made."""
        self._events.send("on_backward_end", self._loop)

    def optimizer_step(self, grad_norm: Tensor) -> None:
        """Tell of an optimizer step that will be made."""
        self._events.send("on_optimizer_step", self._loop, grad_norm)

    @contextmanager
    def watching(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Tell of each step of the optimizers meanwhile, with the norm of the gradients that it uses.

        Collectives: those of `Session.grad_norm` in each of their steps, if somebody wants to know.
        """
        watched = optimizers if self.tells_steps else ()
        handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # A closure makes the gradients only within the step, and maybe several times.
        takes_closure = any(callable(value) for value in (*arguments[1:], options.get("closure")))
        if self.is_told or takes_closure:
            return
        trained = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
        self.optimizer_step(self._session.grad_norm(trained))
