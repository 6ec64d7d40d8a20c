"""From the gradients of one or several batches, each with its weight, to one step of the optimizer."""

import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError, NonFiniteLossError
from tp_core.internal import zero_backward
from tp_core.plugins import Session

from tp_trainer._checks import check_limit, check_not_negative
from tp_trainer._steps._step import LossScaler

# -- Gradients of means over other units than samples: each rank's loss counts as much as its weight
# A session weighs the losses of its data ranks by their samples, which is undone here: so it holds for
# every backend, whether it knows of weights or not.


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

    Collectives: as in `Session.backward`.
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

    Collectives: as in `Session.backward`.
    """
    add_whole(session, loss, weight, total=unit * session.data_size, scale=scale)


def add_nothing(session: Session, loss: Tensor, **graph: bool) -> None:
    """Take part in the backward pass of the other ranks, adding zeros to the gradients.

    Collectives: as in `Session.backward`.
    """
    if session.data_size == 1:
        return
    _adding_nothing.add(session)
    try:
        zero_backward(loss, lambda nothing: session.backward(nothing * 0.0, **graph))
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


# -- From the gradients of one or several batches to one step of the optimizer --------------------


log = logging.getLogger("tp_trainer")

NonFinite = Literal["raise", "skip"]

_SMALLEST_SCALE = 2.0**-10
"""A loss scale below this cannot be the cause of an overflow: the gradients themselves are bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRules:
    """What is done with gradients before the optimizer uses them.

    Attributes:
        clip_norm: The largest global norm of the gradients, or ``None``.
        clip_value: The largest magnitude of an element of them, or ``None``.
        nonfinite: Whether gradients that are NaN or infinite "raise", or the step is skipped.
        max_skipped: How many steps in a row may be skipped.

    Raises:
        ConfigError: A value is out of its range.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: NonFinite = "raise"
    max_skipped: int = 10

    def __post_init__(self) -> None:
        check_limit("clip_norm", self.clip_norm)
        check_limit("clip_value", self.clip_value)
        check_not_negative("max_skipped", self.max_skipped)
        if self.nonfinite not in {"raise", "skip"}:
            msg = f"nonfinite must be 'raise' or 'skip', got {self.nonfinite!r}"
            raise ConfigError(msg)


class OptimizerStep:
    """Makes optimizer steps: adds up batches by their samples, unscales, clips, checks, updates.

    Args:
        session: Where the steps run.
        model: The prepared model.
        optimizer: The prepared optimizer.
        rules: What is done with the gradients.
        accumulate: How many batches make one step, at most.
        scaler: Scales the loss, or ``None``.

    Attributes:
        session: Where the steps run.
        model: The prepared model.
        optimizer: The prepared optimizer.
        scaler: Scales the loss, or ``None``.
        accumulate: How many batches make one step, at most.
        backward: Adds the gradients of one batch's loss, over all data ranks, to the parameters.
            Means of batches are weighed by the samples of all ranks in them, so that the gradient
            of a step is that of the mean over all of its samples.
        count: Steps that were made or left out, since the first one.
        skipped: Steps that were left out, since the first one.
        is_empty: Whether the last step was left out because the weights of its batches were all 0.
        unit: About the weight of one rank's batch, where several batches make a step; ``None`` before
            the first.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer,
        rules: GradientRules,
        *,
        accumulate: int = 1,
        scaler: LossScaler | None = None,
    ) -> None:
        clip_norm, clip_value = rules.clip_norm, rules.clip_value
        self.count = 0
        self.skipped = 0
        self._checked = 0
        self.session = session
        self.model = model
        self.optimizer = optimizer
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        self._clip_value = clip_value
        self.scaler = scaler
        self._raises = rules.nonfinite == "raise"
        self._max_skipped = rules.max_skipped
        self._skipped_in_a_row = 0
        self._weighs = accumulate > 1 and session.job.loss == "mean"
        self._first = self._total = 0  # samples of the first batch, and of all, since the last step
        self.is_empty = False
        self.unit: float | None = None
        self.accumulate = accumulate
        self._accumulates = accumulate > 1
        self._is_weighted = False
        self._weight = 0.0  # of this rank's batches since the last step; of all ranks', if one makes a step
        self._batches = 0  # since the last step
        self._before_step: Callable[[Tensor], None] | None = None
        # Looking at a norm makes an accelerator wait, so there it is looked at only where a
        # decision hangs on it; a loss that is NaN shows soon enough what went wrong.
        self._looks = (
            scaler is not None or not self._raises or (clip_norm is not None and session.device.type == "cpu")
        )
        is_scaled = scaler is not None or self._weighs
        self.backward: Callable[[Tensor], None] = self._scaled_backward if is_scaled else session.backward
        self._is_plain = not (self._looks or self._weighs or clip_norm is not None or clip_value is not None)

    def send_norm_to(self, before_step: Callable[[Tensor], None]) -> None:
        """Have a function called before each step that is made, with the norm of its gradients.

        Collectives: from now on those of `Session.clip_grad_norm` in each step.
        """
        self._before_step = before_step
        self._is_plain = False

    def _scaled_backward(self, loss: Tensor) -> None:
        factor = 1.0 if self.scaler is None else self.scaler.scale
        if self._weighs:
            share = self.session.share
            samples = 1 if share is None else share.total
            self._first = self._first or samples
            self._total += samples
            factor *= samples / self._first
        self.session.backward(loss if factor == 1.0 else loss * factor)

    def weighted_backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradients of a batch whose step said over how many units its loss is a mean.

        One batch that makes a step is weighed before its backward pass, so that gradients are what they
        should be when hooks see them. Of several, the total is known after the last: then their sum is
        divided by it, before it is clipped.

        Args:
            loss: This rank's loss.
            weight: Over how many units; 0 counts as nothing.

        Collectives: as in `Session.backward`; before it an all-reduce of one number, if the batch
        makes a step alone or is the first that is given to one that has several.
        """
        session, scale = self.session, 1.0 if self.scaler is None else self.scaler.scale
        self._is_weighted, self._is_plain = True, False
        if not self._accumulates:
            self._weight = total_weight(session, weight)
            add_whole(session, loss, weight, total=self._weight, scale=scale)
            return
        self._weight += weight
        self._batches += 1
        if self.unit is None and (total := total_weight(session, weight)):
            self.unit = near_power_of_two(total / session.data_size)
        add_part(session, loss, weight, unit=self.unit or 1.0, scale=scale)

    def finish(self) -> bool:
        """Step the optimizer with what has been added up, and return whether it was done.

        All ranks decide alike: they look at the global norm. A step whose weights are all 0, on all
        ranks, has nothing to learn from and is left out.

        Raises:
            NonFiniteLossError: The gradients are NaN or infinite, and that is not to be skipped,
                or was skipped too often.

        Collectives: as in `Session.clip_grad_norm`, if gradients are clipped or looked at; an
        all-reduce of one number, where batches that were added up have weights.
        """
        self.count += 1
        if self._is_plain:
            self.optimizer.step()
            return True
        factor = self._weighted_factor() if self._is_weighted else self._sample_factor()
        self.is_empty = factor is None
        if factor is None:
            self.skipped += 1
            log.info("step %d left out: the weights of all its batches are 0", self.count)
            self.optimizer.zero_grad()
            return False
        if self.scaler is not None:
            factor /= self.scaler.scale
        if factor != 1.0:
            self.session.scale_gradients(self.model, factor)
        if self._clip_value is not None:
            self.session.clip_grad_value(self.model, self._clip_value)
        before_step = self._before_step
        if self._looks or self._clip_norm != math.inf or before_step is not None:
            norm = self.session.clip_grad_norm(self.model, self._clip_norm)
            if self._looks and not self._accepts(norm):
                self.optimizer.zero_grad()
                return False
            if before_step is not None:
                before_step(norm)
        self.optimizer.step()
        return True

    def check_parameters(self) -> None:
        """Make sure that no step has left NaN or infinity in a parameter that is trained.

        Where gradients are not looked at in every step, this is how those of a step that no loss
        followed are found before anything is kept of it: what is not finite stays so.

        Raises:
            NonFiniteLossError: On all ranks, if there is one on any.

        Collectives: as in `Session.gather_objects`.
        """
        if self._looks or self._checked == self.count:
            return
        self._checked = self.count
        found = self.session.gather_objects(self.session.find_nonfinite(self.model))
        rank, name = next(((r, n) for r, n in enumerate(found) if n is not None), (0, None))
        if name is not None:
            msg = (
                f"the parameter {name!r} (rank {rank}) holds NaN or infinity after optimizer step "
                f"{self.count}: the gradients of that step, or of one just before it, did; nothing was "
                "saved after it. Look at the learning rate, the input and divisions, roots or logarithms "
                "in the step"
            )
            raise NonFiniteLossError(msg)

    def _sample_factor(self) -> float:
        """Return what makes of the sum of batches, weighed by the first one's samples, their mean."""
        if not self._weighs:
            return 1.0
        factor = self._first / self._total
        self._first = self._total = 0
        return factor

    def _weighted_factor(self) -> float | None:
        """Return what the gradients lack to be those of the mean over all units; ``None`` for no units."""
        session, weight, batches = self.session, self._weight, self._batches
        self._weight, self._batches = 0.0, 0
        if not self._accumulates:
            return 1.0 if weight else None
        total, unit = total_weight(session, weight), self.unit
        if not total or unit is None:
            return None
        self.unit = near_power_of_two(total / (session.data_size * batches))
        return unit * session.data_size / total if session.job.loss == "mean" else 1.0

    def _accepts(self, norm: Tensor) -> bool:
        """Whether the optimizer may use gradients of this norm."""
        is_finite = bool(torch.isfinite(norm))
        scale = 1.0
        if self.scaler is not None:
            scale = self.scaler.scale
            self.scaler.update(finite=is_finite)
        if is_finite:
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        if self.scaler is not None and scale > _SMALLEST_SCALE:
            log.info("step %d left out: fp16 overflowed at a loss scale of %g", self.count, scale)
            return False
        self._skipped_in_a_row += 1
        if self._raises or self._skipped_in_a_row > self._max_skipped:
            often = "" if self._raises else f", {self._skipped_in_a_row} steps in a row"
            msg = (
                f"the gradients' norm is {norm.item()} at optimizer step {self.count}{often}; the "
                "parameters are those before it. Look at the learning rate, the input and "
                "divisions, roots or logarithms in the step"
            )
            raise NonFiniteLossError(msg)
        log.warning("step %d left out: the gradients' norm is %g", self.count, norm.item())
        return False
