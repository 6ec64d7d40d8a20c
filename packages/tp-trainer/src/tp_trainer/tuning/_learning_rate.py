"""The learning-rate range test: the loss while the rate grows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.data import PreparedLoader, Share, StepOutput, read_weight
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import Session

from tp_trainer._checks import check_callable, check_loader, check_model, check_optimizer, check_positive
from tp_trainer._steps._optimizer_step import learning_rate_of
from tp_trainer._steps._step import Step, loss_of
from tp_trainer._trainer import Trainer
from tp_trainer.tuning._batch_size import traceless

_SMOOTHING = 0.9


@dataclass(frozen=True, slots=True)
class RangeTest:
    """The losses of a range test.

    Attributes:
        rates: The learning rate of each step.
        losses: The loss of each step, before the optimizer used its gradients.
        smoothed: The exponential moving average of the losses, with a decay of 0.9. Its bias at the beginning
            is corrected as in Adam.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]

    @property
    def suggestion(self) -> float | None:
        """A tenth of the rate with the least smoothed loss; ``None`` if the loss never fell.

        At the minimum the loss has stopped falling. It falls fastest at a lower rate, but the noise of
        batches hides that point.

        Source: the rule "minimum" of fastai's ``Learner.lr_find``.
        """
        least = min(range(len(self.smoothed)), key=self.smoothed.__getitem__, default=0)
        is_lower = least > 0 and not math.isclose(self.smoothed[least], self.smoothed[0], rel_tol=1e-6)
        if is_lower:
            return self.rates[least] / 10
        return None


def learning_rate_range_test(
    trainer: Trainer,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    *,
    step: Step,
    lowest: float = 1e-7,
    highest: float = 1.0,
    steps: int = 100,
    stop_at: float = 4.0,
) -> RangeTest:
    """Train some steps while the learning rate grows exponentially, and restore everything.

    Afterwards model, optimizer, random generators and the loader's order are unchanged. Call it on every
    rank, before or after a run.

    Args:
        trainer: The trainer.
        model: The plain model, or the prepared one.
        optimizer: Its optimizer. Parameter groups keep the proportions of their rates; the largest rate goes
            from ``lowest`` to ``highest``.
        loader: Yields the batches; it starts again at its end.
        step: As for ``fit``.
        lowest: The first rate.
        highest: The last rate.
        steps: The number of steps.
        stop_at: End if the smoothed loss exceeds this many times its least value. A NaN or infinite loss
            always ends the test.

    Raises:
        ConfigError: A value is out of its range; or the optimizer has no learning rate.
        LoaderError: The loader yields nothing.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.
    """
    check_model("learning_rate_range_test()", model)
    check_optimizer("learning_rate_range_test()", optimizer)
    check_loader("loader", loader)
    check_callable("step", step)
    check_positive("steps", steps)
    if not 0 < lowest < highest < math.inf or not stop_at > 1:
        msg = (
            "a range test needs 0 < lowest < highest and stop_at > 1, got "
            f"lowest={lowest!r}, highest={highest!r}, stop_at={stop_at!r}"
        )
        raise ConfigError(msg)
    if any(learning_rate_of(group) is None for group in optimizer.param_groups):
        msg = (
            f"a range test sets the learning rate, and {type(optimizer).__name__} has parameter groups "
            "without one ('lr'); give an optimizer that is made with a learning rate"
        )
        raise ConfigError(msg)
    prepared, using = trainer.prepare(model, optimizer)
    batches = trainer.prepare(loader)
    epoch = batches.next_epoch
    growth = (highest / lowest) ** (1 / max(steps - 1, 1))
    try:
        with traceless(trainer, trainer.session.unwrap(prepared), using):
            prepared.train()
            rates = [lowest * growth**i for i in range(steps)]
            return _learn(trainer, prepared, using, step, batches, rates, stop_at)
    finally:
        batches.set_epoch(epoch)


def _learn(
    trainer: Trainer,
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    batches: PreparedLoader,
    rates: Sequence[float],
    stop_at: float,
) -> RangeTest:
    """Make a step at each rate, until the loss grows.

    Collectives: as in :func:`_mean_over_ranks`, `Trainer.backward` and `Trainer.update`, for each step.
    """
    groups = optimizer.param_groups
    largest = max(float(group["lr"]) for group in groups) or 1.0
    parts = [float(group["lr"]) / largest or 1.0 for group in groups]
    losses: list[float] = []
    smoothed: list[float] = []
    average = 0.0
    for rate, batch in zip(rates, _endless(batches), strict=False):
        for group, part in zip(groups, parts, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * part)
            else:
                group["lr"] = rate * part
        optimizer.zero_grad()
        output = trainer.run(step, model, batch)
        loss = _mean_over_ranks(trainer.session, output, batches.share)
        if loss - loss != 0.0:  # NaN or infinite
            break
        trainer.backward(output)
        trainer.update(model, optimizer)
        losses.append(loss)
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed.append(average / (1 - _SMOOTHING ** len(losses)))
        if smoothed[-1] > stop_at * min(smoothed) > 0:
            break
    return RangeTest(tuple(rates[: len(losses)]), tuple(losses), tuple(smoothed))


def _mean_over_ranks(session: Session, output: StepOutput, share: Share | None) -> float:
    """Return the loss over the samples, or units, of all ranks.

    Collectives: one all-reduce of two numbers, if there are several data ranks.
    """
    loss = loss_of(output, training=True).item()
    units = 1.0 if share is None else float(share.samples)
    if units and not isinstance(output, Tensor) and "weight" in output:
        units = read_weight(output["weight"])
    total = loss * units if session.job.loss == "mean" else loss
    counted = total if units else 0.0
    sums = torch.tensor([counted, units], dtype=torch.float64)
    if session.data_size > 1:
        sums = session.reduce(sums, "sum")
    if sums[1]:
        return float(sums[0] / sums[1])
    return math.nan


def _endless(batches: PreparedLoader) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            msg = "the loader yields nothing, and a range test needs batches to train on"
            raise LoaderError(msg)
