"""What is looked at in the first step alone, so that all others cost nothing: whether it can train at all."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from tp_core.errors import StepError
from tp_core.plugins import Session, StepOutput

from tp_trainer._steps._precision import RunStep, Step

__all__ = ["parameters_of", "run_watched", "tell_of_no_gradients"]

log = logging.getLogger("tp_trainer")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def tell_of_no_gradients(parameters: Sequence[Tensor], *, whose: str) -> None:
    """Log a warning if none of the parameters has a gradient, after the first backward pass or step.

    The loss is that of another model then, or of a copy. It is no error, as a phase that trains something
    else may come first.

    Args:
        parameters: Which they are.
        whose: In words.
    """
    if parameters and all(p.grad is None for p in parameters):
        log.warning(
            "no parameter of %s has a gradient after the first backward pass, so nothing of it is trained: "
            "the loss comes from other parameters. Compute it with the model that the step is given, not "
            "with a copy or another one, and make the optimizer from that model's parameters",
            whose,
        )


def run_watched(
    run: RunStep, session: Session, optimizer: Optimizer, step: Step, model: Any, batch: Any
) -> StepOutput:
    """Run the step on a batch of the first optimizer step, and look at whether it does what is for ``fit``.

    Gradients that it makes itself are added to those of the loss that it returns. On one device that may be
    meant, for a loss that comes in pieces; where there are several nobody averages them.

    Raises:
        StepError: The step has stepped the optimizer, or cleared gradients; or made some, where there are
            several devices.
    """
    parameters = parameters_of(optimizer)
    before = [_state(p.grad) for p in parameters]
    handle = optimizer.register_step_pre_hook(_refuse)
    try:
        output = run(step, model, batch)
    finally:
        handle.remove()
    after = [_state(p.grad) for p in parameters]
    if any(old is not None and new is None for old, new in zip(before, after, strict=True)):
        msg = (
            "the step has cleared the gradients of the batches before it, of which fit() makes one optimizer "
            "step with this one's; leave zero_grad() to fit()"
        )
        raise StepError(msg)
    if before != after:
        msg = (
            "the step has called backward() itself, and fit() adds the gradients of the loss that it returns "
            "to those; return the loss alone, or take a loop of your own: trainer.loop(...)"
        )
        if session.data_size > 1 or len(session.job.devices) > 1:
            raise StepError(msg)
        log.warning(msg)
    return output


def _refuse(optimizer: Optimizer, *_: object) -> None:
    msg = (
        f"the step has called step() of the optimizer, {type(optimizer).__name__}, which fit() does after "
        "the backward pass; return the loss alone, or take a loop of your own: trainer.loop(...)"
    )
    raise StepError(msg)


def _state(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)
