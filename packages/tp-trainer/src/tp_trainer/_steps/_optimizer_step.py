"""One step of the optimizer, from the gradients of one or several weighted batches."""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.data import Share, near_power_of_two, zero_backward
from tp_core.errors import ConfigError, NonFiniteLossError
from tp_core.output import get_logger
from tp_core.plugins import Session

from tp_trainer._checks import check_limit, check_not_negative
from tp_trainer._peer_names import explain_fields
from tp_trainer._steps._step import LossScaler

# -- Weighted losses: means over other units than samples -----------------------------------------
# A session gives the losses of its data ranks one weight each where it is given no share of the samples. So
# weights work on every backend, even if it does not know of them.


# Not a context variable: on accelerators autograd runs the backward pass in its own threads.
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
    """Add this rank's part of the gradient of the mean over ``total`` units.

    ``total`` is of all ranks, in all batches of the optimizer step. ``loss`` is a mean over ``weight`` units,
    or their sum, as in ``job.loss``. With a weight of 0 it does not count, and may be NaN.

    Collectives: as in `Session.backward`.
    """
    if not weight:
        add_nothing(session, loss, **graph)
        return
    if session.job.loss == "mean":
        scale *= weight / total * session.data_size  # without a share the session averages over the ranks
    scaled = loss if scale == 1.0 else loss * scale
    session.backward(scaled, None, **graph)


def add_nothing(session: Session, loss: Tensor, **graph: bool) -> None:
    """Take part in the backward pass of the other ranks, and add zeros to the gradients.

    Collectives: as in `Session.backward`.
    """
    if session.data_size == 1:
        return
    _adding_nothing.add(session)
    try:
        zero_backward(loss, lambda nothing: session.backward(nothing * 0.0, None, **graph))
    finally:
        _adding_nothing.discard(session)


def counts_as_nothing(session: Session) -> bool:
    """Return whether the current backward pass of this rank comes from :func:`add_nothing`."""
    return session in _adding_nothing


# -- The optimizer step, from one or several batches ----------------------------------------------


log = get_logger("tp_trainer")

NonFinite = Literal["raise", "skip"]

_SMALLEST_SCALE = 2.0**-10
"""With a loss scale up to this, an overflow is in the gradients themselves, and not due to the scale."""


@explain_fields
@dataclass(frozen=True, kw_only=True)  # no slots, as `Limits`
class GradientRules:
    """The clipping of gradients, and the treatment of NaN and infinite ones.

    Attributes:
        clip_norm: The largest global norm of the gradients, or ``None``.
        clip_value: The largest magnitude of an element of them, or ``None``.
        nonfinite: Whether to "raise" at NaN or infinite gradients, or to "skip" the step.
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


def learning_rate_of(group: Mapping[str, Any]) -> float | None:
    """Return the learning rate of a parameter group; ``None`` where its optimizer has none.

    Some have no such key, and Adafactor with relative steps has ``None``.
    """
    rate = group.get("lr")
    if rate is None:
        return None
    return float(rate)


class OptimizerStep:
    """Makes optimizer steps: accumulates batches by their samples, unscales, clips, checks, updates.

    Attributes:
        backward: Adds the gradients of one batch's loss, over all data ranks, to the parameters; it takes the
            loss and its share. Each batch is weighted by the samples of all ranks in it, so that a step has
            the gradient of the mean over all of its samples. Collectives: as in `Session.backward`.
        count: The steps made or skipped since the first one.
        skipped: The steps skipped since the first one.
        is_empty: Whether the last step was skipped because the weights of its batches were all 0.
        unit: About the weight of one rank's batch, if several batches make a step; ``None`` before the
            first.
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
        # Reading the norm makes an accelerator wait, so there it is read only for a decision. Otherwise
        # the meter's next look at the losses finds NaN, or `check_parameters` does before a save.
        self._looks = (
            scaler is not None or not self._raises or (clip_norm is not None and session.device.type == "cpu")
        )
        is_scaled = scaler is not None or self._weighs
        self.backward: Callable[[Tensor, Share | None], None] = (
            self._scaled_backward if is_scaled else session.backward
        )
        self._is_plain = not (self._looks or self._weighs or clip_norm is not None or clip_value is not None)

    def send_norm_to(self, before_step: Callable[[Tensor], None]) -> None:
        """Call a function before each optimizer step, with the norm of its gradients.

        Collectives: as in `Session.clip_grad_norm`, from now on in each step.
        """
        self._before_step = before_step
        self._is_plain = False

    def _scaled_backward(self, loss: Tensor, share: Share | None) -> None:
        factor = 1.0
        if self.scaler is not None:
            self.scaler.begin_backward([self.model])
            factor = self.scaler.scale
        if self._weighs:
            samples = 1 if share is None else share.total
            self._first = self._first or samples
            self._total += samples
            factor *= samples / self._first
        scaled = loss if factor == 1.0 else loss * factor
        self.session.backward(scaled, share)

    def weighted_backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradients of a batch with a weight: the number of units that its loss is a mean over.

        If one batch makes a step, it is weighted before its backward pass, so that hooks see the final
        gradients. With several batches the total is known only after the last. Their sum is then divided by
        it, before clipping.

        Collectives: as in `Session.backward`; before it an all-reduce of one number, if one batch makes a
        step, or for the first batch of all.
        """
        session, scale = self.session, 1.0
        if self.scaler is not None:
            self.scaler.begin_backward([self.model])
            scale = self.scaler.scale
        self._is_weighted, self._is_plain = True, False
        if not self._accumulates:
            self._weight = total_weight(session, weight)
            add_whole(session, loss, weight, total=self._weight, scale=scale)
            return
        self._weight += weight
        self._batches += 1
        if self.unit is None and (total := total_weight(session, weight)):
            self.unit = near_power_of_two(total / session.data_size)
        # The total is not known yet: `_weighted_factor` corrects it. A unit of about the weight of one rank's
        # batch keeps the gradients near their final size.
        add_whole(session, loss, weight, total=(self.unit or 1.0) * session.data_size, scale=scale)

    def finish(self) -> bool:
        """Step the optimizer with the accumulated gradients, and return whether the step was made.

        All ranks decide the same, as the global norm is equal on them. A step with weights of 0 on all ranks
        has no gradient and is skipped.

        Collectives: as in `Session.clip_grad_norm`, if gradients are clipped or checked; an all-reduce of one
        number, if the accumulated batches have weights.
        """
        self.count += 1
        if self._is_plain:
            self.optimizer.step()
            return True
        if self._is_weighted:
            factor = self._weighted_factor()
        else:
            factor = self._sample_factor()
        self.is_empty = factor is None
        if factor is None:
            self.skipped += 1
            log.info("step %d left out: the weights of all its batches are 0", self.count)
            self.optimizer.zero_grad()
            return False
        if self.scaler is not None:
            self.scaler.unscale(self.session, self.model, factor)
        elif factor != 1.0:
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
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        return True

    def check_parameters(self) -> None:
        """Make sure that no step has left NaN or infinity in a trained parameter.

        If gradients are not checked in every step, this finds the bad gradients of the last step before
        anything is saved: no later loss has shown them. A parameter that is NaN stays NaN.

        Raises:
            NonFiniteLossError: On all ranks, if a rank has such a parameter.

        Collectives: as in `Session.gather_objects`.
        """
        if self._looks or self._checked == self.count:
            return
        self._checked = self.count
        own = self.session.find_nonfinite(self.model)
        names = self.session.gather_objects(own, where="parameters that are not finite")
        rank, name = next(((r, n) for r, n in enumerate(names) if n is not None), (0, None))
        if name is not None:
            msg = (
                f"the parameter {name!r} (rank {rank}) holds NaN or infinity after optimizer step "
                f"{self.count}: the gradients of that step, or of one just before it, did; nothing was "
                "saved after it. Look at the learning rate, the input and divisions, roots or logarithms "
                "in the step"
            )
            raise NonFiniteLossError(msg)

    def _sample_factor(self) -> float:
        """Return the factor from the sum of batches, weighted relative to the first one, to their mean."""
        if not self._weighs:
            return 1.0
        factor = self._first / self._total
        self._first = self._total = 0
        return factor

    def _weighted_factor(self) -> float | None:
        """Return the factor from the gradients to the mean's over all units; ``None`` for no units.

        Collectives: one all-reduce of a number over the data ranks, if several batches make a step.
        """
        session, weight, batches = self.session, self._weight, self._batches
        self._weight, self._batches = 0.0, 0
        if not self._accumulates:
            if weight:
                return 1.0
            return None
        total, unit = total_weight(session, weight), self.unit
        if not total or unit is None:
            return None
        self.unit = near_power_of_two(total / (session.data_size * batches))
        if session.job.loss == "mean":
            return unit * session.data_size / total
        return 1.0

    def _accepts(self, norm: Tensor) -> bool:
        """Return whether the optimizer may use gradients of this norm."""
        is_finite = bool(torch.isfinite(norm))
        scale = 1.0
        if self.scaler is not None:
            scale = self.scaler.scale
            self.scaler.note(finite=is_finite)
        if is_finite:
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        if self.scaler is not None and scale > _SMALLEST_SCALE:
            log.info("step %d left out: fp16 overflowed at a loss scale of %g", self.count, scale)
            return False
        self._skipped_in_a_row += 1
        if self._raises or self._skipped_in_a_row > self._max_skipped:
            if self._raises:
                often = ""
            else:
                often = f", {self._skipped_in_a_row} steps in a row"
            msg = (
                f"the gradients' norm is {norm.item()} at optimizer step {self.count}{often}; the "
                "parameters are those before it. Look at the learning rate, the input and "
                "divisions, roots or logarithms in the step"
            )
            raise NonFiniteLossError(msg)
        log.warning("step %d left out: the gradients' norm is %g", self.count, norm.item())
        return False
