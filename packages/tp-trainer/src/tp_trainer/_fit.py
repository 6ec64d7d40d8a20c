"""The training and the evaluation loop. The hot path: what is not needed in a step is not in it."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import Session, StepOutput
from tp_core.errors import LoaderError

from tp_trainer._metrics import Meter, loss_of
from tp_trainer._progress import Ticker

__all__ = ["Scheduler", "Step", "evaluate", "train_epoch"]

Step = Callable[[nn.Module, Any], StepOutput]


class Scheduler(Protocol):
    """What is asked of a learning-rate scheduler."""

    def step(self) -> None:
        """Move on."""


def train_epoch(
    session: Session,
    step: Step,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    steps: int,
    meter: Meter,
    ticker: Ticker,
    clip_norm: float | None = None,
    scheduler: Scheduler | None = None,
) -> None:
    """Train on ``steps`` batches.

    Args:
        session: Where the steps run.
        step: The user's step.
        model: The prepared model.
        optimizer: The prepared optimizer.
        batches: The prepared loader.
        steps: How many batches make the epoch.
        meter: Adds up what the steps return.
        ticker: Shows how far it is.
        clip_norm: The largest global norm of the gradients, or ``None``.
        scheduler: Moved on after every step, or ``None``.

    Raises:
        StepError: The step returned no usable loss.
        NonFiniteLossError: The loss is NaN or infinite.
        LoaderError: The loader ended before ``steps`` batches.
    """
    run, backward, add = session.run, session.backward, meter.add
    zero_grad, update = optimizer.zero_grad, optimizer.step
    done = 0
    next_look = ticker.next_look
    for batch in islice(batches, steps):
        zero_grad()
        output = run(step, model, batch)
        loss = loss_of(output, training=True)
        add(loss, output)
        backward(loss)
        if clip_norm is not None:
            session.clip_grad_norm(model, clip_norm)
        update()
        if scheduler is not None:
            scheduler.step()
        done += 1
        if done >= next_look:
            ticker.look(done, meter.last_loss)
            next_look = ticker.next_look
    if done < steps:
        msg = (
            f"the loader ended after {done} of {steps} batches; give steps_per_epoch={done}, or a "
            "loader that has as many batches as it says"
        )
        raise LoaderError(msg)
    meter.flush()


def evaluate(session: Session, step: Step, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return the means of what ``step`` returns over all samples of all data ranks.

    The model is in evaluation mode and records no gradients meanwhile; each submodule gets its
    own mode back.

    Collectives: the buffers' broadcasts before, one gather and one all-reduce after.
    """
    modes = [(module, module.training) for module in model.modules()]
    meter = Meter(session, what="validation")
    model.eval()
    try:
        with torch.no_grad():
            session.sync_buffers(model)
            for batch in batches:
                output = session.run(step, model, batch)
                meter.add(loss_of(output, training=False), output)
        return meter.means()
    finally:
        for module, training in modes:
            module.training = training
