"""The evaluation of a model on a loader: means over its samples, and metrics of all of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from tp_core.errors import ConfigError
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._metrics._metric import Metric
from tp_trainer._metrics._metric_set import MetricSet
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._ended import telling_of_ended_iterators
from tp_trainer._steps._loss import loss_of
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._modes import modes_kept
from tp_trainer._steps._precision import RunStep, Step

__all__ = ["evaluate", "evaluating", "named_loaders"]


def named_loaders(what: str, given: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, Iterable[Any]]:
    """Return loaders by what their results' names begin with: nothing where there is one alone.

    Raises:
        ConfigError: There are several without names, or their names cannot be used.
    """
    if not isinstance(given, Mapping):
        return {"": given}
    bad = [name for name in given if not isinstance(name, str) or not name or "/" in name]
    if bad or not given:
        msg = (
            f"{what} must be a loader, or a dict of loaders by names without '/', got the names {list(given)}"
        )
        raise ConfigError(msg)
    return {f"{name}/": loader for name, loader in given.items()}


def evaluate(
    session: Session,
    run: RunStep,
    step: Step,
    model: nn.Module,
    batches: PreparedLoader,
    metrics: Mapping[str, Metric] | None = None,
    *,
    boundaries: StepBoundaries | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Return the means of what ``step`` returns over all samples, or units, of all data ranks, and metrics.

    The model is in evaluation mode and records no gradients meanwhile; each submodule gets its
    own mode back.

    Args:
        session: Where the step runs.
        run: Runs the step.
        step: The user's step; it need not return a loss.
        model: The prepared model.
        batches: The prepared loader.
        metrics: Of the whole set, by the names under which the step returns their arguments.
        boundaries: As `Rounds` takes it, for an evaluation that signals cut short.
        most: On how many batches; ``None`` for all.

    Raises:
        CutShortError: A rank has seen a signal; on all ranks, between the same two batches.

    Collectives: the buffers' broadcasts before, one gather and one all-reduce after; those of `MetricSet`.
    """
    meter = Meter(session, what="validation")
    metric_set = MetricSet(session, metrics or {}, boundaries=boundaries)
    collecting = metric_set.collecting(step)
    with telling_of_ended_iterators(), evaluating(session, model), batches.whole(), torch.no_grad():
        for batch in islice(batches, most):
            output = metric_set.take(batches.number, run(collecting, model, batch))
            has_no_loss = isinstance(output, Mapping) and "loss" not in output
            meter.add(None if has_no_loss else loss_of(output, training=False), output)
        metric_set.finish()
        means = meter.means()
        return {**means, **metric_set.compute()} if meter.samples else {}


@contextmanager
def evaluating(session: Session, model: nn.Module) -> Iterator[None]:
    """Have the model in evaluation mode, with the same buffers on all ranks; then each module in its own.

    Collectives: the buffers' broadcasts.
    """
    with modes_kept(model):
        model.eval()
        with torch.no_grad():
            session.sync_buffers(model)
        yield
