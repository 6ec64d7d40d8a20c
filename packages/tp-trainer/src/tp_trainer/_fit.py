"""The training and the evaluation loop. The hot path: what is not needed in a step is not in it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import Session, StepOutput
from tp_core.errors import LoaderError

from tp_trainer._metrics import Meter, loss_of
from tp_trainer._update import Update

__all__ = ["RunStep", "Scheduler", "Step", "evaluate", "train_epoch"]

Step = Callable[[nn.Module, Any], StepOutput]
RunStep = Callable[[Step, nn.Module, Any], StepOutput]


class Scheduler(Protocol):
    """What is asked of a learning-rate scheduler."""

    def step(self) -> None:
        """Move on."""


def train_epoch(
    run: RunStep,
    step: Step,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    *,
    first: int,
    steps: int,
    accumulate: int,
    hold: Callable[[nn.Module], AbstractContextManager[None]],
    meter: Meter,
    update: Update,
    scheduler: Scheduler | None,
    look: Callable[[int], float],
) -> None:
    """Train on the batches of one epoch.

    Args:
        run: Runs the user's step where the session wants it.
        step: The user's step.
        model: The prepared model.
        optimizer: The prepared optimizer.
        batches: The prepared loader.
        first: How many batches of the epoch are done already; the loader stands behind them.
        steps: How many batches make the epoch.
        accumulate: How many batches make one optimizer step; the last one of an epoch may have
            fewer.
        hold: Keeps gradients on their rank while another batch is to be added to them.
        meter: Adds up what the steps return.
        update: Makes the optimizer steps.
        scheduler: Moved on after every optimizer step, or ``None``.
        look: Called between optimizer steps with the number of done batches; returns at which
            number it wants to be called again.

    Raises:
        StepError: The step returned no usable loss.
        NonFiniteLossError: The loss or the gradients are NaN or infinite.
        LoaderError: The loader ended before ``steps`` batches.
    """
    add, backward, finish, zero_grad = meter.add, update.backward, update.finish, optimizer.zero_grad
    begin_step, forget_step = meter.begin_step, meter.forget_step

    done = first
    begins = True
    next_look = look(done)
    for batch in islice(batches, steps - first):
        done += 1
        if begins:
            zero_grad()
            begin_step()
        begins = accumulate == 1 or done % accumulate == 0 or done == steps
        if not begins:
            with hold(model):
                output = run(step, model, batch)
                loss = loss_of(output, training=True)
                add(loss, output)
                backward(loss)
            continue
        output = run(step, model, batch)
        loss = loss_of(output, training=True)
        add(loss, output)
        backward(loss)
        if not finish():
            forget_step()
        elif scheduler is not None:
            scheduler.step()
        if done >= next_look:
            next_look = look(done)
    if done < steps:
        msg = (
            f"the loader ended after {done} of {steps} batches; give steps_per_epoch={done}, or a "
            "loader that has as many batches as it says"
        )
        raise LoaderError(msg)
    meter.flush()


def evaluate(
    session: Session, run: RunStep, step: Step, model: nn.Module, batches: Iterable[Any]
) -> dict[str, float]:
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
                output = run(step, model, batch)
                meter.add(loss_of(output, training=False), output)
        return meter.means()
    finally:
        for module, training in modes:
            module.training = training
