"""Means over samples of what steps return, on one device or over all ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tp_core import Session
from tp_core.errors import NonFiniteLossError, StepError

__all__ = ["Meter", "added_states", "empty_state", "loss_of"]

_FLUSH_EVERY = 50  # steps; an accelerator is waited for only so often


def loss_of(output: Any, *, training: bool) -> Tensor:
    """Return the loss in what a step returned.

    Raises:
        StepError: There is none, or it is not a scalar tensor that leads to parameters.
    """
    if type(output) is Tensor and output.requires_grad and not output.dim():
        return output  # nearly always: what follows is slow beside a small model
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        got = f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else repr(output)
        msg = (
            f"the step must return its loss, a scalar tensor, or a dict with it as 'loss'; it returned {got}"
        )
        raise StepError(msg)
    if loss.dim() != 0 and loss.numel() != 1:
        msg = (
            f"the step's loss must be a scalar, got shape {tuple(loss.shape)}; "
            "return its mean over the samples (loss.mean())"
        )
        raise StepError(msg)
    if training and not loss.requires_grad:
        msg = (
            "the step's loss leads to no parameter (it does not require grad); compute it from "
            "the model's output, without .item(), .detach() or torch.no_grad()"
        )
        raise StepError(msg)
    return loss


class Meter:
    """Adds up what steps return, weighted by samples, and stops at a loss that is not finite.

    On the CPU each loss is looked at when it comes, before it can do harm. On an accelerator that
    would make every step wait for the device, so losses are looked at together every 50 steps,
    and before anything is saved.

    Args:
        session: Where the steps run.
        what: The words for the steps in messages: "training", "validation".
        first_step: The number of the first step, for messages.
        tolerate: Leave losses out that are not finite, instead of stopping at them, and be ready to
            forget those of a whole optimizer step.
    """

    def __init__(
        self, session: Session, *, what: str = "training", first_step: int = 1, tolerate: bool = False
    ) -> None:
        self._session = session
        self._what = what
        self._looks_at_once = tolerate or session.device.type == "cpu"
        self._step = first_step
        self._tolerates = tolerate
        self._is_mean = session.job.loss == "mean"
        self._pending: list[tuple[Tensor, int]] = []
        self._losses = 0.0
        self._others: dict[str, Any] = {}
        self.samples = 0
        self.last_loss = math.nan
        self._before = (0, 0.0, self._others)

    def add(self, loss: Tensor, output: Any) -> None:
        """Count one step, whose loss has been taken out of its output.

        Raises:
            NonFiniteLossError: The loss, or one before it, is NaN or infinite.
        """
        share = self._session.share
        samples = 1 if share is None else share.samples
        counts = True
        if self._looks_at_once:
            counts = self._count(loss.item(), samples)
        else:
            self._pending.append((loss.detach().reshape(()), samples))
            if len(self._pending) >= _FLUSH_EVERY:
                self.flush()
        if output is not loss and counts:
            self._add_others(output, samples)

    def begin_step(self) -> None:
        """Note where an optimizer step begins, for :meth:`forget_step`."""
        if self._tolerates:
            self._before = (self.samples, self._losses, dict(self._others))

    def forget_step(self) -> None:
        """Take out what was counted since :meth:`begin_step`, on this rank and, so, on all."""
        if self._tolerates:
            self.samples, self._losses, self._others = self._before

    def flush(self) -> None:
        """Look at the losses that are still on the device."""
        if self._pending:
            pending, self._pending = self._pending, []
            values = torch.stack([loss for loss, _ in pending]).tolist()
            for value, (_, samples) in zip(values, pending, strict=True):
                self._count(value, samples)

    def _count(self, value: float, samples: int) -> bool:
        """Count a loss, and return whether it counts."""
        step = self._step
        self._step += 1
        # x - x is 0 for finite x alone, and costs less than a call of math.isfinite.
        if value - value != 0.0 and samples:
            if self._tolerates:
                return False
            msg = (
                f"the loss is {value} at {self._what} step {step} "
                f"(rank {self._session.rank}); nothing was saved after it. Look at the learning "
                "rate, the input and divisions or logarithms in the step"
            )
            raise NonFiniteLossError(msg)
        self.samples += samples
        if samples:
            total = value * samples if self._is_mean else value
            self._losses += total
            self.last_loss = total / samples
        return True

    def _add_others(self, output: Mapping[str, Any], samples: int) -> None:
        others = self._others
        for name, value in output.items():
            if name == "loss":
                continue
            if isinstance(value, Tensor):
                # Kept where it is: nobody looks at it before the end.
                number: Any = value.detach().double().mean()
            elif isinstance(value, int | float):
                number = value
            else:
                msg = (
                    f"the step's {name!r} must be a number or a tensor to be averaged, got "
                    f"{type(value).__name__}: {value!r}"
                )
                raise StepError(msg)
            others[name] = others.get(name, 0.0) + number * samples

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's sums as plain numbers: what :meth:`load_state_dict` takes."""
        self.flush()
        others = {name: float(value) for name, value in self._others.items()}
        return {"step": self._step, "samples": self.samples, "loss": self._losses, "others": others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._step, self.samples, self._losses = state["step"], state["samples"], state["loss"]
        self._others = dict(state["others"])

    def means(self) -> dict[str, float]:
        """Return the means over all samples of all data ranks, "loss" first.

        Collectives: one object gather, so that ranks without a sample take part too, and one
        all-reduce over the data ranks.
        """
        self.flush()
        session = self._session
        names = sorted({name for known in session.gather_objects(sorted(self._others)) for name in known})
        values = [float(self._others.get(name, 0.0)) for name in names]
        sums = torch.tensor([self.samples, self._losses, *values], dtype=torch.float64)
        if session.data_size > 1:
            sums = session.reduce(sums, "sum")
        samples, *totals = sums.tolist()
        self.samples = int(samples)
        if not samples:
            return {}
        return {name: total / samples for name, total in zip(["loss", *names], totals, strict=True)}


def empty_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a meter at the same step that has counted nothing."""
    return {"step": state["step"], "samples": 0, "loss": 0.0, "others": {}}


def added_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a meter that has counted what all of these have."""
    names = {name for state in states for name in state["others"]}
    return {
        "step": states[0]["step"],
        "samples": sum(state["samples"] for state in states),
        "loss": math.fsum(state["loss"] for state in states),
        "others": {n: math.fsum(state["others"].get(n, 0.0) for state in states) for n in names},
    }
