"""From the gradients of one or several batches to one step of the optimizer."""

import logging
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core import Session
from tp_core.errors import ConfigError, NonFiniteLossError

from tp_trainer._precision import LossScaler

__all__ = ["NonFinite", "Update"]

log = logging.getLogger("tp_trainer")

NonFinite = Literal["raise", "skip"]

_SMALLEST_SCALE = 2.0**-10
"""A loss scale below this cannot be the cause of an overflow: the gradients themselves are bad."""


class Update:
    """Makes optimizer steps: adds up batches by their samples, unscales, clips, checks, updates.

    Args:
        session: Where the steps run.
        model: The prepared model.
        optimizer: The prepared optimizer.
        accumulate: How many batches make one step, at most.
        clip_norm: The largest global norm of the gradients, or ``None``.
        clip_value: The largest magnitude of an element of them, or ``None``.
        scaler: Scales the loss, or ``None``.
        nonfinite: Whether gradients that are NaN or infinite "raise", or the step is left out.
        max_skipped: How many steps in a row may be left out.

    Raises:
        ConfigError: An argument has a wrong value.

    Attributes:
        backward: Adds the gradients of one batch's loss, over all data ranks, to the parameters.
            Means of batches are weighed by the samples of all ranks in them, so that the gradient
            of a step is that of the mean over all of its samples.
        count: Steps that were made or left out, since the first one.
        skipped: Steps that were left out, since the first one.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: LossScaler | None = None,
        nonfinite: NonFinite = "raise",
        max_skipped: int = 10,
    ) -> None:
        for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None and not value > 0:
                msg = f"{name} must be None or greater than 0, got {value!r}"
                raise ConfigError(msg)
        if nonfinite not in {"raise", "skip"}:
            msg = f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}"
            raise ConfigError(msg)
        self.count = 0
        self.skipped = 0
        self._checked = 0
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._clip_norm = math.inf if clip_norm is None else clip_norm
        self._clip_value = clip_value
        self._scaler = scaler
        self._raises = nonfinite == "raise"
        self._max_skipped = max_skipped
        self._skipped_in_a_row = 0
        self._weighs = accumulate > 1 and session.job.loss == "mean"
        self._first = self._total = 0  # samples of the first batch, and of all, since the last step
        # Looking at a norm makes an accelerator wait, so there it is looked at only where a
        # decision hangs on it; a loss that is NaN shows soon enough what went wrong.
        self._looks = (
            scaler is not None or not self._raises or (clip_norm is not None and session.device.type == "cpu")
        )
        is_scaled = scaler is not None or self._weighs
        self.backward: Callable[[Tensor], None] = self._scaled_backward if is_scaled else session.backward
        self._is_plain = not (self._looks or self._weighs or clip_norm is not None or clip_value is not None)

    def _scaled_backward(self, loss: Tensor) -> None:
        factor = 1.0 if self._scaler is None else self._scaler.scale
        if self._weighs:
            share = self._session.share
            samples = 1 if share is None else share.total
            self._first = self._first or samples
            self._total += samples
            factor *= samples / self._first
        self._session.backward(loss if factor == 1.0 else loss * factor)

    def finish(self) -> bool:
        """Step the optimizer with what has been added up, and return whether it was done.

        All ranks decide alike: they look at the global norm.

        Raises:
            NonFiniteLossError: The gradients are NaN or infinite, and that is not to be skipped,
                or was skipped too often.

        Collectives: those of `Session.clip_grad_norm`, if gradients are clipped or looked at.
        """
        self.count += 1
        if self._is_plain:
            self._optimizer.step()
            return True
        self._unscale()
        if self._clip_value is not None:
            nn.utils.clip_grad_value_(self._model.parameters(), self._clip_value)
        if self._looks or self._clip_norm != math.inf:
            norm = self._session.clip_grad_norm(self._model, self._clip_norm)
            if self._looks and not self._accepts(norm):
                self._optimizer.zero_grad()
                return False
        self._optimizer.step()
        return True

    def check_parameters(self) -> None:
        """Make sure that no step has left NaN or infinity in a parameter that is trained.

        Where gradients are not looked at in every step, this is how those of a step that no loss
        followed are found before anything is kept of it: what is not finite stays so.

        Raises:
            NonFiniteLossError: On all ranks, if there is one on any.

        Collectives: those of `Session.gather_objects`.
        """
        if self._looks or self._checked == self.count:
            return
        self._checked = self.count
        found = self._session.gather_objects(self._first_not_finite())
        rank, name = next(((r, n) for r, n in enumerate(found) if n is not None), (0, None))
        if name is not None:
            msg = (
                f"the parameter {name!r} (rank {rank}) holds NaN or infinity after optimizer step "
                f"{self.count}: the gradients of that step, or of one just before it, did; nothing was "
                "saved after it. Look at the learning rate, the input and divisions, roots or logarithms "
                "in the step"
            )
            raise NonFiniteLossError(msg)

    def _first_not_finite(self) -> str | None:
        named = [(n, p) for n, p in self._session.unwrap(self._model).named_parameters() if p.requires_grad]
        if not named or torch.isfinite(nn.utils.get_total_norm([p for _, p in named], math.inf)):
            return None
        return next(n for n, p in named if not torch.isfinite(p).all())

    def _unscale(self) -> None:
        factor = 1.0 if self._scaler is None else 1.0 / self._scaler.scale
        if self._weighs:
            factor *= self._first / self._total
            self._first = self._total = 0
        if factor != 1.0:
            with torch.no_grad():
                for parameter in self._model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def _accepts(self, norm: Tensor) -> bool:
        """Whether the optimizer may use gradients of this norm."""
        is_finite = bool(torch.isfinite(norm))
        scale = 1.0
        if self._scaler is not None:
            scale = self._scaler.scale
            self._scaler.update(finite=is_finite)
        if is_finite:
            self._skipped_in_a_row = 0
            return True
        self.skipped += 1
        if self._scaler is not None and scale > _SMALLEST_SCALE:
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
