"""Training of a module: its steps in the loop of tp, with automatic or manual optimization."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError, StepError
from tp_core.plugins import Callback, RunView
from tp_trainer import LogOptions, Loop, Validation

from tp_lightning._arguments import LengthArguments, LoggingArguments, ValidationArguments
from tp_lightning._checkpoints import ModuleState, SavingArguments
from tp_lightning._evaluation import evaluate
from tp_lightning._module import call_step, length_of, overrides, transferred
from tp_lightning._module_calls import ModuleCalls
from tp_lightning._run import ModuleRun


class ModuleTraining:
    """The training of a module.

    Args:
        run: The module at work, which was prepared.
        calls: Clips gradients as the module does it.
        length: How long it is.
        times: When it validates.
        logging: What it logs to.
        saving: Where and when it saves.
    """

    def __init__(
        self,
        run: ModuleRun,
        calls: ModuleCalls,
        *,
        length: LengthArguments,
        times: ValidationArguments,
        logging: LoggingArguments,
        saving: SavingArguments,
    ) -> None:
        self._run = run
        self._calls = calls
        self._length = length
        self._times = times
        self._logging = logging
        self._saving = saving

    def fit(
        self, train: Any, validation: Sequence[Any], *, callbacks: Sequence[Callback], ckpt_path: Any
    ) -> None:
        """Train with loaders of the user, from the beginning or from a checkpoint."""
        run = self._run
        model = run.model
        loader = run.own.prepare(train)
        val_loaders = [run.own.prepare(given, training=False) for given in validation]
        steps_per_epoch = None
        if run.batches.fit is not None:
            steps_per_epoch = run.batches.cut("fit", len(loader))
        validating = None
        if val_loaders and hasattr(model, "validation_step"):
            self._check_sanity(val_loaders)
            validating = self._validation(val_loaders, steps_per_epoch or length_of(loader))
        resume = "auto" if ckpt_path == "last" else ckpt_path
        with run.own.loop(
            loader,
            limits=self._length.limits(steps_per_epoch),
            validation=validating,
            checkpoint=self._saving.due_after(validating),
            resume=resume,
            callbacks=[*callbacks, _EpochEvents(self)],
            log=self._log_options(),
            state=self._state(),
        ) as loop:
            run.loop = loop
            run.global_step = max(run.global_step, loop.step)
            run.training = True
            model.train()
            run.hook("on_fit_start")
            run.hook("on_train_start")
            for batches in loop.by_epoch():
                for index, batch in enumerate(batches, start=loop.batches_done):
                    self._train_batch(loop, batch, index)
            run.hook("on_train_end")
            run.hook("on_fit_end")
            run.training = False
        self._saving.name_newest()

    def _state(self) -> dict[str, Any]:
        """Return what is saved, by names."""
        run = self._run
        state: dict[str, Any] = {"model": run.prepared, "module": ModuleState(run)}
        for i, optimizer in enumerate(run.optimizers):
            if len(run.optimizers) == 1:
                name = "optimizer"
            else:
                name = f"optimizer_{i}"
            state[name] = optimizer
        for i, schedule in enumerate(run.schedules):
            state[f"scheduler_{i}"] = schedule.scheduler
        return state

    def _log_options(self) -> LogOptions | None:
        if not self._logging.loggers:
            return None
        hyperparameters = dict(getattr(self._run.model, "hparams", {})) or None
        return LogOptions(
            self._logging.loggers, every_steps=self._logging.every_steps, hyperparameters=hyperparameters
        )

    def _check_sanity(self, loaders: Sequence[PreparedLoader]) -> None:
        """Validate a few batches before the first one is trained on."""
        if self._times.sanity_batches:
            self._run.sanity_checking = True
            evaluate(self._run, "validate", loaders, most=self._times.sanity_batches)
            self._run.sanity_checking = False
            self._run.results.newest.clear()

    def _validation(self, loaders: Sequence[PreparedLoader], steps: int | None) -> Validation:
        run = self._run

        def validate() -> dict[str, float]:
            if (run.current_epoch + 1) % self._times.every_epochs:
                return {}
            logged = evaluate(run, "validate", loaders)
            if run.loop is not None:  # under their own names; those with "val_" get theirs from tp
                run.loop.log(**{n: v for n, v in logged.items() if not n.startswith("val_")})
            return {n.removeprefix("val_"): float(v) for n, v in logged.items() if n.startswith("val_")}

        every = self._times.interval
        if every is None or every == 1.0:
            return Validation(validate)
        if isinstance(every, float):
            if steps is None:
                msg = f"val_check_interval={every} needs a loader with a length; give a number of batches"
                raise ConfigError(msg)
            every = max(1, int(steps * every))
        return Validation(validate, every_steps=max(1, int(every) // run.gradients.accumulate))

    def _train_batch(self, loop: Loop, batch: Any, index: int) -> None:
        model = self._run.model
        run = self._run
        batch = transferred(model, batch)
        run.results.begin("training_step", batch)
        if self._run.hook("on_train_batch_start", batch, index) == -1:
            msg = (
                "on_train_batch_start() has returned -1, to skip the rest of the epoch, which is not here; "
                "write Trainer(limit_train_batches=...), or set trainer.should_stop"
            )
            raise ConfigError(msg)
        if run.is_automatic:
            is_last = index + 1 == loop.steps_per_epoch
            output = self._optimize(loop, batch, index)
            if loop.ends_step:
                self._step_schedulers("step", index + 1, plateau=False)
            if is_last:
                self._step_schedulers("epoch", run.current_epoch + 1, plateau=False)
        else:
            with run.own.autocast():
                output = call_step(model, "training_step", batch, index)
        self._run.hook("on_train_batch_end", output, batch, index)
        if run.is_automatic and loop.ends_step:
            self._step_schedulers("step", index + 1, plateau=True)

    def _optimize(self, loop: Loop, batch: Any, index: int) -> Any:
        """Take a batch with automatic optimization; return what ``training_step`` returned."""
        run = self._run
        model = run.model
        own = run.own
        optimizer = run.optimizers[0]
        accumulate = run.gradients.accumulate
        outputs: list[Any] = []

        def closure() -> Tensor:
            quiet: AbstractContextManager[None] = nullcontext() if loop.ends_step else own.no_sync(model)
            with quiet:
                output = own.run(lambda m, b: call_step(m, "training_step", b, index), model, batch)
                if isinstance(output, Mapping):
                    loss = output["loss"]
                else:
                    loss = output
                if not isinstance(loss, Tensor):
                    msg = (
                        f"training_step() has returned {type(output).__name__}; return the loss, or a dict "
                        "with it under 'loss'. To leave out a batch, return a loss times 0"
                    )
                    raise StepError(msg)
                outputs.append(output)
                if index % accumulate == 0:
                    self._run.hook("on_before_zero_grad", optimizer)
                    if hasattr(model, "optimizer_zero_grad"):
                        model.optimizer_zero_grad(run.current_epoch, index, optimizer)
                    else:
                        optimizer.zero_grad()
                loss = loss / accumulate
                self._run.hook("on_before_backward", loss)
                own.backward(loss)
                self._run.hook("on_after_backward")
            return loss.detach()

        if not loop.ends_step:
            closure()
        elif isinstance(optimizer, LBFGS) or overrides(model, "optimizer_step"):

            def whole() -> Tensor:
                loss = closure()
                self._run.hook("on_before_optimizer_step", optimizer)
                self._clip(optimizer)
                return loss

            if hasattr(model, "optimizer_step"):
                model.optimizer_step(run.current_epoch, index, optimizer, whole)
            else:
                optimizer.step(whole)  # type: ignore[arg-type]  # torch calls float() on it
            run.global_step += 1
        else:
            closure()
            self._run.hook("on_before_optimizer_step", optimizer)
            clip = run.gradients.clip
            if clip and not overrides(model, "configure_gradient_clipping"):
                if run.gradients.algorithm == "value":
                    name = "clip_value"
                else:
                    name = "clip_norm"
                own.update(model, optimizer, **{name: clip})
            else:
                self._clip(optimizer)
                own.update(model, optimizer)
            run.global_step += 1
        return outputs[-1]

    def _clip(self, optimizer: Optimizer) -> None:
        model = self._run.model
        value = self._run.gradients.clip
        algorithm = self._run.gradients.algorithm
        if overrides(model, "configure_gradient_clipping"):
            model.configure_gradient_clipping(
                optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
            )
        elif value:
            self._calls.clip_gradients(optimizer, value, algorithm)

    def _step_schedulers(self, interval: str, done: int, *, plateau: bool) -> None:
        model = self._run.model
        results = self._run.results
        for schedule in self._run.schedules:
            is_due = schedule.interval == interval and not done % schedule.frequency
            if not is_due or schedule.on_plateau is not plateau:
                continue
            metric = None
            if plateau:
                if schedule.monitor not in results.newest:
                    if not schedule.strict:
                        continue
                    msg = (
                        f"a scheduler monitors {schedule.monitor!r}, which was not logged; logged were "
                        f"{', '.join(sorted(results.newest)) or 'no numbers'}"
                    )
                    raise ConfigError(msg)
                metric = results.newest[schedule.monitor]
            if hasattr(model, "lr_scheduler_step"):
                model.lr_scheduler_step(schedule.scheduler, metric)
            else:
                arguments = () if metric is None else (metric,)
                schedule.scheduler.step(*arguments)

    def end_epoch(self) -> None:
        """End an epoch: the module's hook, the means of it, schedulers that look at them."""
        self._run.results.begin("on_train_epoch_end", None)
        self._run.hook("on_train_epoch_end")
        self._run.results.finish("train", self._run.session)
        if self._run.is_automatic:
            self._step_schedulers("epoch", self._run.current_epoch + 1, plateau=True)

    def begin_epoch(self) -> None:
        """Begin an epoch: the module's hook."""
        self._run.results.begin("on_train_epoch_start", None)
        self._run.hook("on_train_epoch_start")


class _EpochEvents(Callback):
    """Passes the beginnings and ends of epochs to the module."""

    def __init__(self, training: ModuleTraining) -> None:
        self._training = training

    def on_epoch_start(self, run: RunView) -> None:  # noqa: ARG002
        self._training.begin_epoch()

    def on_epoch_end(self, run: RunView) -> None:  # noqa: ARG002
        self._training.end_epoch()
