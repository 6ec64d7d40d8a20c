"""Building the loop of a run: the user's objects by kinds, the length of an epoch, agreement of the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError

from tp_trainer._opening._agreement import check_same, check_same_optimizers
from tp_trainer._preparation import Preparation
from tp_trainer._running._log import RunLog
from tp_trainer._running._loop import LOG_STATE, Loop, LoopHooks
from tp_trainer._running._settings import LoopSettings, batches_per_epoch
from tp_trainer._running._state import RunState, Trained, UserState

if TYPE_CHECKING:
    from tp_trainer._running._watchdog import Watchdog


def build_loop(
    preparation: Preparation,
    settings: LoopSettings,
    train: PreparedLoader,
    *,
    hooks: LoopHooks,
    watchdog: "Watchdog | None",
    logs: RunLog,
    **own: Mapping[str, Any],
) -> Loop:
    """Return a loop that is ready to start, after a check that all ranks have the same arguments.

    ``own`` has the run's models, optimizers and schedulers, beside those in the user's ``state=``.

    Raises:
        DisagreementError: The ranks were given different arguments, or optimizers with different settings.

    Collectives: two gathers of objects.
    """
    session = preparation.session
    settings = replace(settings, backend=preparation.selection.chosen.name, choice=preparation.take_choice())
    targets = _classify_state(preparation, settings.state, **own)
    steps = batches_per_epoch(train, settings.limits)
    train.continues_stream = settings.limits.overfit_batches is None and not settings.limits.restart_stream
    logged = {LOG_STATE: logs} if logs.is_asked else {}
    user_state = UserState(
        session,
        settings.state,
        targets.others,
        callbacks={**settings.events.states(), **logged},
        models=targets.trained.models,
    )
    kinds = {
        "log": logs.is_asked,
        "models": sorted(targets.trained.models),
        "optimizers": sorted(targets.trained.optimizers),
    }
    if session.world_size > 1:
        check_same(session, {**settings.facts(steps), **hooks.facts(), **kinds})
    if session.data_size > 1:
        check_same_optimizers(session, targets.trained.optimizers, beside=None)
    if settings.checkpoint is None:
        weights = "all"
    else:
        weights = settings.checkpoint.weights
    state = RunState(session, targets.trained, user_state, train, hooks.optimizer_step, weights)
    return Loop(session, settings, state, train, hooks=hooks, logs=logs, steps=steps, watchdog=watchdog)


@dataclass(frozen=True, slots=True)
class _CheckpointTargets:
    """What checkpoints save: what is trained, and the names of the user's other objects in ``state=``."""

    trained: Trained
    others: tuple[str, ...]


def _classify_state(
    preparation: Preparation,
    state: Mapping[str, Any],
    *,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    schedulers: Mapping[str, Any] | None = None,
) -> _CheckpointTargets:
    """Return the user's ``state=`` by kinds, together with the run's own objects.

    A module is a model if it was prepared, or if an optimizer in ``state`` has its parameters. Any other
    module, for example an average of weights, is saved as a plain object with state.
    """
    models, optimizers, schedulers = dict(models or {}), dict(optimizers or {}), dict(schedulers or {})
    for objects in (models, optimizers, schedulers):
        for name in objects:
            if name in state:
                msg = f"state= cannot have {name!r}: fit() keeps its own {name} under that name"
                raise ConfigError(msg)
    optimizers |= {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    trained = {id(p) for group in groups for p in group["params"]}
    prepared = dict(models)
    others = []
    for name, value in state.items():
        if isinstance(value, nn.Module):
            wrapped = preparation.known_model(value)
            if wrapped is not None:
                models[name] = prepared[name] = wrapped
            elif any(id(p) in trained for p in value.parameters()):
                models[name] = value
            else:
                others.append(name)
        elif isinstance(value, LRScheduler | ReduceLROnPlateau):
            schedulers[name] = value
        elif not isinstance(value, Optimizer):
            others.append(name)
    saved_ids = {id(p) for model in models.values() for p in model.parameters()}
    for name, optimizer in optimizers.items():
        preparation.session.check_optimizer(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if name in state and any(id(p) not in saved_ids for p in parameters):
            msg = (
                f"the optimizer {name!r} in state= has parameters of no model there, so what it trains would "
                "be lost: name the model too, as in state={'model': model, 'optimizer': optimizer}"
            )
            raise ConfigError(msg)
    trained_objects = Trained(models, optimizers, schedulers, prepared, preparation.scaler)
    return _CheckpointTargets(trained_objects, tuple(others))
