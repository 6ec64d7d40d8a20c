"""The validation of a run: on one loader, or several by name, with metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import PreparedLoader, Session, StepOutput

from tp_trainer._metrics._evaluation import evaluate
from tp_trainer._metrics._metric import Metric
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._steps._precision import RunStep, Step

__all__ = ["Validation", "metric_for_scheduler", "numbers_in", "without_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a run is evaluated on, and how.

    Attributes:
        run: Runs the step.
        step: The user's step.
        loaders: The prepared loaders, by what the names of their results begin with.
        metrics: Of each loader's whole set, by name.
    """

    run: RunStep
    step: Step
    loaders: Mapping[str, PreparedLoader]
    metrics: Mapping[str, Metric]

    def evaluate(
        self,
        session: Session,
        model: nn.Module,
        *,
        epoch: int,
        boundaries: StepBoundaries | None = None,
        most: int | None = None,
    ) -> dict[str, float]:
        """Return the means and the metrics that are numbers, of all loaders.

        Args:
            session: Where the step runs.
            model: The prepared model.
            epoch: Which epoch of the loaders it is.
            boundaries: As `Rounds` takes it, for a validation that signals cut short.
            most: On how many batches of each loader.

        Raises:
            CutShortError: A rank has seen a signal; on all ranks, between the same two batches.
            LoaderError: A loader has yielded no sample, on any rank.

        Collectives: those of `evaluate`, for each loader.
        """
        results: dict[str, float] = {}
        for prefix, batches in self.loaders.items():
            batches.set_epoch(epoch)
            cut: dict[str, Any] = {"boundaries": boundaries, "most": most}
            found = evaluate(session, self.run, self.step, model, batches, self.metrics, **cut)
            if not found:
                which = f" {prefix.rstrip('/')!r}" if prefix else ""
                msg = (
                    f"the validation's loader{which} has yielded no sample, so there is no result; an "
                    "iterator, such as a generator, is gone through once: give what begins anew, such as a "
                    "list or a DataLoader"
                )
                raise LoaderError(msg)
            results |= {prefix + name: value for name, value in numbers_in(found).items()}
        return results


def numbers_in(results: Mapping[str, Any]) -> dict[str, float]:
    """Return those results of an evaluation that are numbers: a matrix is not for histories and loggers."""
    return {name: float(value) for name, value in results.items() if isinstance(value, Real)}


def without_metrics(step: Step, metrics: Mapping[str, Metric]) -> Step:
    """Return a step for training, without what it returns for metrics: they are of the validation."""
    if not metrics:
        return step

    def trained(model: nn.Module, batch: Any) -> StepOutput:
        output = step(model, batch)
        if not isinstance(output, Mapping):
            return output
        return {name: value for name, value in output.items() if name not in metrics}

    return trained


def metric_for_scheduler(
    name: str | None, train: Mapping[str, float], val: Mapping[str, float], *, validates: bool
) -> float:
    """Return what a scheduler looks at that looks at a metric.

    Args:
        name: As in the history, "val_f1" or "loss"; ``None`` for the loss of the validation, or else of the
            training.
        train: The means of the epoch's training.
        val: The results of its validation.
        validates: Whether there is one.

    Raises:
        ConfigError: The run has no metric of that name.
    """
    known = {**train, **{f"val_{key}": value for key, value in val.items()}}
    wanted = name or ("val_loss" if validates else "loss")
    if wanted not in known:
        msg = (
            f"the scheduler looks at {wanted!r}, which is none of the metrics of the run: "
            f"{', '.join(known) or 'none'}; name one of them: fit(monitor=...)"
        )
        raise ConfigError(msg)
    return known[wanted]
