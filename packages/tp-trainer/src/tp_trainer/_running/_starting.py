"""From the arguments of ``fit`` or ``loop`` to a loop that is ready to begin."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checks._values import check_positive
from tp_trainer._opening._agreement import check_same, check_same_optimizers
from tp_trainer._running._duties import Duties
from tp_trainer._running._kept import Kept
from tp_trainer._running._limits import Limits
from tp_trainer._running._log import RunLog
from tp_trainer._running._loop import Loop
from tp_trainer._running._settings import LoopSettings
from tp_trainer._running._state import RunState, Trained
from tp_trainer._running._watchdog import Watchdog
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import LossScaler

__all__ = ["Sorted", "sort_state", "start_loop"]


LOG_STATE = "run:loggers"
"""The name under which checkpoints keep what loggers need to go on; no callback can have it."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The user's ``state=`` by kinds.

    Attributes:
        trained: Models, optimizers and schedulers, as the backend keeps them.
        others: The names of all else.
    """

    trained: Trained
    others: tuple[str, ...]


def sort_state(
    session: Session,
    state: Mapping[str, Any],
    *,
    prepared: Callable[[nn.Module], nn.Module | None],
    scaler: LossScaler | None,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    schedulers: Mapping[str, Any] | None = None,
) -> Sorted:
    """Return the user's ``state=`` by kinds, with what the run has besides.

    A module is a model where it was prepared, or where an optimizer in ``state`` has its parameters; any
    other one, such as an average of weights, is kept as it is.

    Args:
        session: Says which optimizers can step.
        state: What the user named.
        prepared: Returns the prepared model of a module, if it was prepared.
        scaler: Scales the loss, or ``None``.
        models: Models that the run has anyway.
        optimizers: Optimizers that the run has anyway.
        schedulers: Schedulers that the run has anyway.

    Raises:
        ConfigError: A name is taken, or an optimizer has parameters of no model in ``state``, or cannot
            step what it has.
    """
    models, optimizers, schedulers = dict(models or {}), dict(optimizers or {}), dict(schedulers or {})
    for taken in (models, optimizers, schedulers):
        for name in taken:
            if name in state:
                msg = f"state= cannot have {name!r}: fit() keeps its own {name} under that name"
                raise ConfigError(msg)
    optimizers |= {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    trained = {id(p) for one in optimizers.values() for group in one.param_groups for p in group["params"]}
    others = []
    for name, value in state.items():
        if isinstance(value, nn.Module):
            found = prepared(value)
            if found is not None:
                models[name] = found
            elif any(id(p) in trained for p in value.parameters()):
                models[name] = value
            else:
                others.append(name)
        elif isinstance(value, LRScheduler | ReduceLROnPlateau):
            schedulers[name] = value
        elif not isinstance(value, Optimizer):
            others.append(name)
    known = {id(p) for model in models.values() for p in model.parameters()}
    for name, one in optimizers.items():
        session.check_optimizer(one)
        parameters = [p for group in one.param_groups for p in group["params"]]
        if name in state and any(id(p) not in known for p in parameters):
            msg = (
                f"the optimizer {name!r} in state= has parameters of no model there, so what it trains would "
                "be lost: name the model too, as in state={'model': model, 'optimizer': optimizer}"
            )
            raise ConfigError(msg)
    return Sorted(Trained(models, optimizers, schedulers, scaler), tuple(others))


def start_loop(
    session: Session,
    settings: LoopSettings,
    found: Sorted,
    train: PreparedLoader,
    *,
    duties: Duties,
    watchdog: Watchdog,
    logs: RunLog,
    optimizer_step: OptimizerStep | None = None,
) -> Loop:
    """Return a loop that is ready to begin, once all ranks have been found to mean the same.

    Raises:
        ConfigError: An epoch has no batches.
        DisagreementError: The ranks were given different arguments, or optimizers with different settings.
        LoaderError: The loader has no length, or less than the limits want.

    Collectives: two gathers of objects.
    """
    steps = _steps_in(train, settings.limits)
    train.goes_on = settings.limits.overfit_batches is None and not settings.limits.restart_stream
    logged = {LOG_STATE: logs} if logs.is_asked else {}
    kept = Kept(session, settings.state, found.others, callbacks={**settings.events.states(), **logged})
    kinds = {
        "log": logs.is_asked,
        "models": sorted(found.trained.models),
        "optimizers": sorted(found.trained.optimizers),
    }
    check_same(session, {**settings.facts(steps), **kinds})
    check_same_optimizers(session, found.trained.optimizers)
    return Loop(
        session,
        settings,
        RunState(session, found.trained, kept, train, optimizer_step),
        train,
        duties=duties,
        logs=logs,
        steps=steps,
        watchdog=watchdog,
    )


def _steps_in(train: PreparedLoader, limits: Limits) -> int:
    """Return how many batches make an epoch.

    Raises:
        ConfigError: The loader has no batches.
        LoaderError: The loader has no length and none was given, or less than was given.
    """
    wanted = limits.steps_per_epoch
    try:
        has = len(train)
    except LoaderError:
        if wanted is None:
            raise
        has = wanted
    check_positive("the number of batches in the loader", has)
    if wanted is not None and wanted > has:
        msg = (
            f"steps_per_epoch={wanted} is more than the loader has: it would have ended after {has} of "
            f"{wanted} batches; give steps_per_epoch={has}, or none, and more epochs"
        )
        raise LoaderError(msg)
    steps = has if wanted is None else wanted
    return steps if limits.overfit_batches is None else min(steps, limits.overfit_batches)
