"""Gradients of means over other units than samples: each rank's loss counts as much as its weight.

A session weighs the losses of its data ranks by their samples, which is undone here: so it holds for
every backend, whether it knows of weights or not.
"""

import math
import weakref

import torch
from torch import Tensor
from tp_core.internal import backward_of_nothing
from tp_core.plugins import Session

__all__ = [
    "add_nothing",
    "add_part",
    "add_whole",
    "counts_as_nothing",
    "near_power_of_two",
    "total_weight",
]

# Not a context variable: on accelerators the backward pass runs in threads of its own.
_adding_nothing: weakref.WeakSet[Session] = weakref.WeakSet()


def total_weight(session: Session, weight: float) -> float:
    """Return the sum of the data ranks' weights.

    Collectives: one all-reduce of a number over the data ranks, if there are several.
    """
    if session.data_size == 1:
        return weight
    return session.reduce(torch.tensor([weight], dtype=torch.float64), "sum").item()


def add_whole(
    session: Session, loss: Tensor, weight: float, *, total: float, scale: float = 1.0, **graph: bool
) -> None:
    """Add the gradient of the mean over ``total`` units, of which this rank's loss is over ``weight``.

    Args:
        session: Where the steps run.
        loss: This rank's loss: a mean over its units, or their sum, as the job says.
        weight: How many units those are; 0 counts as nothing, and then the loss may be NaN.
        total: How many units the optimizer step has on all ranks, in all of its batches.
        scale: A factor on the loss.
        **graph: What `Session.backward` takes besides.

    Collectives: those of `Session.backward`.
    """
    if not weight:
        add_nothing(session, loss, **graph)
        return
    if session.job.loss == "mean":
        scale *= weight / total * _inverse_share(session)
    session.backward(loss if scale == 1.0 else loss * scale, **graph)


def add_part(session: Session, loss: Tensor, weight: float, *, unit: float, scale: float = 1.0) -> None:
    """Add the gradient of a batch of which only the end of the optimizer step will say how much it counts.

    The gradients are then to be multiplied by ``unit * session.data_size / total``.

    Args:
        session: Where the steps run.
        loss: As in :func:`add_whole`.
        weight: As in :func:`add_whole`.
        unit: About the weight of one rank's batch, the same on all ranks: keeps the gradients about as
            large as they will be.
        scale: A factor on the loss.

    Collectives: those of `Session.backward`.
    """
    add_whole(session, loss, weight, total=unit * session.data_size, scale=scale)


def add_nothing(session: Session, loss: Tensor, **graph: bool) -> None:
    """Take part in the backward pass of the other ranks, adding zeros to the gradients.

    Collectives: those of `Session.backward`.
    """
    if session.data_size == 1:
        return
    _adding_nothing.add(session)
    try:
        backward_of_nothing(loss, lambda nothing: session.backward(nothing * 0.0, **graph))
    finally:
        _adding_nothing.discard(session)


def counts_as_nothing(session: Session) -> bool:
    """Whether the backward pass under way on this rank is one of :func:`add_nothing`."""
    return session in _adding_nothing


def near_power_of_two(number: float) -> float:
    """Return a power of two near ``number``, to multiply by without rounding."""
    return math.ldexp(1.0, round(math.log2(number)))


def _inverse_share(session: Session) -> float:
    """Return how much smaller the session makes this rank's loss than the mean over all ranks'."""
    share = session.share
    if share is None or session.data_size == 1:
        return float(session.data_size)
    return share.total / share.samples
