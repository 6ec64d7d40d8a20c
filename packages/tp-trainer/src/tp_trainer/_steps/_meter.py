"""Means of the steps' outputs, over samples or other units, on one device or over all ranks."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tp_core.data import Share, read_weight, split_weight
from tp_core.device_types import wide_float
from tp_core.errors import NonFiniteLossError, StepError
from tp_core.plugins import Session

_FLUSH_EVERY = 50  # steps between two waits for the accelerator


class Meter:
    """Adds up the steps' outputs, weighted, and raises at a NaN or infinite loss.

    A step's weight is the "weight" that it returned, or its number of samples. A metric that is a pair
    ``(mean, weight)`` has its own weight. A value of weight 0 does not count, and may be NaN.

    On the CPU each loss is checked at once, before its gradients are used. On an accelerator that would make
    every step wait for the device, so losses are checked together, every 50 steps and before anything is
    saved.

    Args:
        tolerate: Leave out NaN and infinite losses, instead of raising, and prepare for
            :meth:`forget_step`.
        weighs: Whether earlier steps returned a weight; ``None`` without any.

    Attributes:
        weighs: Whether all steps return a weight, or none; ``None`` before the first.
        last_loss: The loss of the last step; ``None`` before the first.
    """

    def __init__(
        self,
        session: Session,
        *,
        what: str = "training",
        first_step: int = 1,
        tolerate: bool = False,
        weighs: bool | None = None,
    ) -> None:
        self._session = session
        self._what = what
        self._looks_at_once = tolerate or session.device.type == "cpu"
        self._step = first_step
        self.tolerates = tolerate
        self._is_mean = session.job.loss == "mean"
        self._is_plain = self._looks_at_once and self._is_mean
        self._pending: list[tuple[Tensor, int, float]] = []
        self._losses = 0.0
        self._weight: float = 0
        self._metrics: dict[str, tuple[Any, float]] = {}
        self._has_loss: bool | None = None
        self.weighs = weighs
        self.samples = 0
        self.last_loss: float | None = None
        self._before: tuple[int, float, float, dict[str, tuple[Any, float]]] = (0, 0.0, 0, {})

    def add(self, loss: Tensor | None, output: Any, share: Share | None) -> float | None:
        """Count one step; return the weight that it returned, 0 for a stand-in, ``None`` if it returned none.

        An evaluation may have no loss. Without a share the batch counts as one sample.

        Collectives: in training over several data ranks an all-gather of objects, at the first step.
        """
        samples = 1 if share is None else share.samples
        if output is loss and loss is not None and self.weighs is False and self._is_plain:
            value = loss.item()
            if value - value == 0.0 and samples:  # as _count does: its call would double the cost
                self._step += 1
                self.samples += samples
                self._weight += samples
                self._losses += value * samples
                self.last_loss = value
            else:
                self._count(value, samples, samples)
            return None
        weight = None
        if output is not loss and "weight" in output:
            weight = read_weight(output["weight"]) if samples else 0.0
        if (weight is not None) is not self.weighs:
            self._agree(gives=weight is not None)
        units = samples if weight is None else weight
        counts = True
        if loss is None or self._has_loss is not True:
            self._note_loss(has_loss=loss is not None)
        if loss is None:
            self._step += 1
            self.samples += samples
        elif self._looks_at_once:
            counts = self._count(loss.item(), samples, units)
        else:
            self._pending.append((loss.detach().reshape(()), samples, units))
            if len(self._pending) >= _FLUSH_EVERY:
                self.flush()
        if output is not loss and counts:
            for name, returned in output.items():
                if name not in {"loss", "weight"}:
                    self._add_other(name, returned, samples, units)
        return weight

    def log(self, numbers: Mapping[str, Any], share: Share | None) -> None:
        """Add numbers of a custom loop's batch, weighted by its samples."""
        samples = 1 if share is None else share.samples
        for name, value in numbers.items():
            self._add_other(name, value, samples, samples)

    def count(self, share: Share | None) -> None:
        self._step += 1
        self.samples += 1 if share is None else share.samples

    def _agree(self, *, gives: bool) -> None:
        """Record whether steps return a weight; refuse a mixture.

        In training, a weight costs a collective: ranks that differed would wait in different ones.

        Raises:
            DisagreementError: Steps return a weight on some ranks alone.

        Collectives: in training over several data ranks, once: an all-gather of objects.
        """
        if self.weighs is not None:
            now, before = ("a", "none") if gives else ("no", "one")
            msg = (
                f"the step returned {now} 'weight' at {self._what} step {self._step}, and {before} before; "
                "return it always (0 where there is nothing to count), or never"
            )
            raise StepError(msg)
        self.weighs = gives
        if self._what == "training" and self._session.data_size > 1:
            self._session.check_agreement("whether the step returns a 'weight'", gives)

    def _note_loss(self, *, has_loss: bool) -> None:
        """Record whether steps return a loss; refuse a mixture."""
        if self._has_loss is (not has_loss):
            now, before = ("a", "none") if has_loss else ("no", "one")
            msg = (
                f"the step returned {now} 'loss' at {self._what} step {self._step}, and {before} before; "
                "return it always, or, in an evaluation, never"
            )
            raise StepError(msg)
        self._has_loss = has_loss

    def begin_step(self) -> None:
        """Record the sums at the beginning of an optimizer step, for :meth:`forget_step`."""
        if self.tolerates:
            self._before = (self.samples, self._losses, self._weight, dict(self._metrics))

    def forget_step(self) -> None:
        """Restore the sums of :meth:`begin_step`; all ranks skip the same steps."""
        if self.tolerates:
            self.samples, self._losses, self._weight, self._metrics = self._before

    def totals(self) -> tuple[float, float]:
        self.flush()
        return self._losses, self._weight

    def flush(self) -> None:
        """Read and count the losses that are still on the device."""
        if self._pending:
            pending, self._pending = self._pending, []
            values = torch.stack([loss for loss, _, _ in pending]).tolist()
            for value, (_, samples, units) in zip(values, pending, strict=True):
                self._count(value, samples, units)

    def _count(self, value: float, samples: int, units: float) -> bool:
        """Count a loss; return ``False`` if it is left out."""
        step = self._step
        self._step += 1
        # x - x is 0 only for finite x, and is cheaper than math.isfinite(x).
        if value - value != 0.0 and units:
            if self.tolerates:
                return False
            msg = (
                f"the loss is {value} at {self._what} step {step} "
                f"(rank {self._session.rank}); nothing was saved after it. Look at the learning "
                "rate, the input and divisions or logarithms in the step"
            )
            raise NonFiniteLossError(msg)
        self.samples += samples
        if units:
            total = value * units if self._is_mean else value
            self._losses += total
            self._weight += units
            self.last_loss = total / units
        return True

    def _add_other(self, name: str, returned: Any, samples: int, units: float) -> None:
        metrics = self._metrics
        value, own = split_weight(name, returned)
        if own is None:
            weight = units
        else:
            weight = own if samples else 0.0
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            # Stays on its device, so that the step need not wait for it.
            number: Any = value.detach().to(wide_float(value.device)).reshape(())
        elif isinstance(value, Real):
            number = float(value)
        else:
            what = repr(value)
            if isinstance(value, Tensor):
                what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            msg = (
                f"the step's {name!r} must be a number or a scalar tensor, of which means are made, got "
                f"{type(value).__name__}: {what:.200}; return its mean, or a pair (mean, weight); "
                "of a model's output, return the loss alone: output.loss"
            )
            raise StepError(msg)
        total, before = metrics.get(name, (0.0, 0))
        if weight:
            metrics[name] = (total + number * weight, before + weight)
        else:
            metrics[name] = (total, before)

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return {
            "step": self._step,
            "samples": self.samples,
            "weighs": self.weighs,
            "loss": [self._losses, self._weight],
            "others": {name: [float(total), weight] for name, (total, weight) in self._metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self.samples, self.weighs = state["step"], state["samples"], state["weighs"]
        self._losses, self._weight = state["loss"]
        self._metrics = {name: (total, weight) for name, (total, weight) in state["others"].items()}

    def means(self) -> dict[str, float]:
        """Return the means over all data ranks, "loss" first if there is one; a mean of weight 0 is NaN.

        Raises:
            DisagreementError: Steps returned a weight on some ranks alone.

        Collectives: one gather of objects, so that ranks without a sample learn the names, and one
        all-reduce over the data ranks.
        """
        self.flush()
        session = self._session
        seen = (self.weighs, self._has_loss, sorted(self._metrics))
        everyones = session.gather_objects(seen, where="names of means")
        has_losses = any(weighs is not None for weighs, _, _ in everyones)
        if {True, False} <= {weighs for weighs, _, _ in everyones}:
            session.check_agreement("whether the step returns a 'weight'", self.weighs)
        names = sorted({name for _, _, theirs in everyones for name in theirs})
        has_no_loss = any(has_loss is False for _, has_loss, _ in everyones)
        own = [self._metrics.get(name, (0.0, 0)) for name in names]
        sums = [
            self.samples,
            self._losses,
            self._weight,
            *(float(number) for pair in own for number in pair),
        ]
        totals = torch.tensor(sums, dtype=torch.float64)
        if session.data_size > 1:
            totals = session.reduce(totals, "sum")
        samples, *pairs = totals.tolist()
        self.samples = int(samples)
        if not samples:
            return {}
        summed = list(zip(["loss", *names], pairs[::2], pairs[1::2], strict=True))
        if not has_losses:
            del summed[0]  # a loop of one's own may log a "loss" among the others
        means = {}
        for name, total, weight in summed:
            means[name] = total / weight if weight else math.nan
        if has_no_loss:
            del means["loss"]
        return means


# -- The sum of several ranks' meters, for a resume with another number of ranks ------------------


def empty_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a meter at the same step, with sums of 0."""
    return {**state, "samples": 0, "loss": [0.0, 0], "others": {}}


def added_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a meter with the sums of all these states."""
    names = {name for state in states for name in state["others"]}
    nothing = [0.0, 0]
    return {
        "step": states[0]["step"],
        "samples": sum(state["samples"] for state in states),
        "weighs": states[0]["weighs"],
        "loss": _added([state["loss"] for state in states]),
        "others": {n: _added([state["others"].get(n, nothing) for state in states]) for n in sorted(names)},
    }


def _added(pairs: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(total for total, _ in pairs), math.fsum(weight for _, weight in pairs)]
