"""From the checked arguments of a run to its first batch."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from tp_core.plugins import PreparedLoader

from tp_trainer._checks._objects import check_no_others, check_owner
from tp_trainer._checks._values import as_hyperparameters
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._trainer._base import TrainerBase

if TYPE_CHECKING:
    from tp_core.plugins import Callback

    from tp_trainer._metrics._evaluation import Validation
    from tp_trainer._opening._boundaries import StepBoundaries
    from tp_trainer._running._custom_loop import ManualStepEvents
    from tp_trainer._running._events import Events
    from tp_trainer._running._history import History
    from tp_trainer._running._log import RunLog
    from tp_trainer._running._loop import Loop
    from tp_trainer._running._settings import FitSettings, LoopSettings
    from tp_trainer._running._watchdog import Watchdog

__all__ = ["RunStarter"]


class RunStarter(TrainerBase):
    """Starts the runs of a trainer."""

    def _events(self, callbacks: Iterable["Callback | str"]) -> "Events":
        from tp_trainer._running._callbacks import find_callbacks
        from tp_trainer._running._events import Events

        return Events(*find_callbacks(callbacks, self._lazy.plugins))

    def _plan_log(self, settings: "LoopSettings", optimizers: Iterable[Optimizer]) -> "RunLog":
        from tp_trainer._running._log import of_optimizer, plan_log

        checkpoints, limits = settings.checkpoints(), settings.limits
        known = {
            "epochs": limits.epochs,
            "max_steps": limits.max_steps,
            "precision": self._precision,
            "accumulate": self._accumulate,
            "seed": self._seed,
            "world_size": self.session.world_size,
            "backend": self.selection.chosen.name,
        }
        for optimizer in optimizers:
            known |= of_optimizer(optimizer)
        return plan_log(
            self.session,
            settings.log,
            plugins=self._lazy.plugins,
            every_steps=settings.log_every_steps,
            folder=None if checkpoints is None else Path(checkpoints.folder).absolute(),
            selection=self.selection,
            hyperparameters={**known, **as_hyperparameters(settings.hyperparameters)},
        )

    def _start_loop(
        self,
        train: PreparedLoader,
        settings: "LoopSettings",
        validate: Callable[[], Mapping[str, float]] | None,
    ) -> "Loop":
        """Return the loop of a run whose steps are its user's."""
        from tp_trainer._running._custom_loop import CustomLoopHooks
        from tp_trainer._running._loop import build_loop, classify_state
        from tp_trainer._running._watchdog import Watchdog

        optimizers = [value for value in settings.state.values() if isinstance(value, Optimizer)]
        return build_loop(
            self.session,
            replace(settings, backend=self.selection.chosen.name),
            classify_state(self.session, settings.state, prepared=self._prepared.get, scaler=self._scaler),
            train,
            hooks=CustomLoopHooks(
                self.session,
                settings.events,
                validate,
                evaluating=self._evaluating_at,
                sending=self._sending_steps,
            ),
            watchdog=Watchdog(self.environment, settings.step_timeout_s),
            logs=self._plan_log(settings, optimizers),
        )

    @contextmanager
    def _evaluating_at(self, boundaries: "StepBoundaries | None") -> Iterator[None]:
        """Have evaluations cut short at boundaries meanwhile, where a signal has come."""
        self._boundaries = boundaries
        try:
            yield
        finally:
            self._boundaries = None

    @contextmanager
    def _sending_steps(self, events: "ManualStepEvents") -> Iterator[None]:
        """Send the events of the steps that are made meanwhile; loops may be open within one another."""
        before, self._step_events = self._step_events, events
        try:
            yield
        finally:
            self._step_events = before

    def _fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        settings: "FitSettings",
        owned: ExitStack,
    ) -> "History":
        """Prepare what a run of ``fit`` needs, and train; ``owned`` takes what is the run's until it ends."""
        from tp_trainer._memory._work import Work
        from tp_trainer._running._fit import FitHooks, train
        from tp_trainer._running._loop import build_loop, classify_state
        from tp_trainer._running._watchdog import Watchdog

        session = self._open(model, by="fit()", work=Work(optimizer, train_loader, settings.step))
        logs = self._plan_log(settings, [optimizer])
        check_owner(optimizer, [model])
        if session.world_size > 1:
            check_no_others(optimizer, model, "its gradients would differ between the ranks")
        if settings.checkpoints() is not None:
            check_no_others(optimizer, model, "its value would be in no checkpoint")
        save = owned.enter_context(self._saving(model, settings.save_to))
        model = self._prepare_model(model)
        optimizer_step = OptimizerStep(
            session,
            model,
            session.prepare_optimizer(optimizer),
            settings.gradients,
            accumulate=self._accumulate,
            scaler=self._scaler,
        )
        loader = self._loader(train_loader, shard=settings.shard)
        self._epochs.go_on(train_loader, loader)
        watchdog = Watchdog(self.environment, settings.step_timeout_s)
        hooks = FitHooks(
            settings,
            optimizer_step,
            self._run_step(),
            self._validation(settings, watchdog),
            train=loader,
            after_epoch=save,
        )
        targets = classify_state(
            session,
            settings.state,
            prepared=self._prepared.get,
            scaler=self._scaler,
            models={"model": model},
            optimizers={"optimizer": optimizer_step.optimizer},
            schedulers={} if settings.scheduler is None else {"scheduler": settings.scheduler},
        )
        loop = build_loop(
            session,
            replace(settings, backend=self.selection.chosen.name),
            targets,
            loader,
            hooks=hooks,
            watchdog=watchdog,
            logs=logs,
            optimizer_step=optimizer_step,
        )
        self._may_step = True
        try:
            return train(loop, hooks)
        finally:
            self._may_step = False
            self._epochs.note(train_loader, loader)

    def _validation(self, settings: "FitSettings", watchdog: "Watchdog") -> "Validation | None":
        from tp_trainer._metrics._evaluation import Validation

        loaders = {
            name: self._loader(loader, shard=settings.shard, training=False)
            for name, loader in settings.val_loaders().items()
        }
        if not loaders:
            return None
        return Validation(
            run=watchdog.watch(self._run_step()),
            step=settings.val_step or settings.step,
            loaders=loaders,
            metrics=settings.metrics,
        )

    @contextmanager
    def _saving(self, model: nn.Module, path: str | os.PathLike[str] | None) -> Iterator[Callable[[], None]]:
        """Yield what saves the model after every epoch, if there is a place that can be written to.

        Raises:
            ConfigError: ``path`` is not a path, or another run's.
            OSError: No file can be written there; on every rank.

        Collectives: one broadcast, if there is a path.
        """
        if path is None:
            yield lambda: None
            return
        from tp_trainer._checkpoint._model_files import own_place, save_model

        with own_place(self.session, path):
            place = Path(path).absolute()  # wherever the process goes meanwhile
            yield lambda: save_model(self.session, self._prepare_model(model), place)
