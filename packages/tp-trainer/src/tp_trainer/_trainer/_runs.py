"""Whole runs: ``fit``, and the loop under it for custom training."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from tp_core.errors import ConfigError

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks._objects import check_loader, check_model, check_optimizer, check_scheduler
from tp_trainer._memory._running_out import tell_why
from tp_trainer._steps._optimizer_step import GradientRules, NonFinite
from tp_trainer._steps._step import Step
from tp_trainer._trainer._run_starter import RunStarter

if TYPE_CHECKING:
    from tp_core.plugins import Callback

    from tp_trainer._metrics._metric import Metric
    from tp_trainer._running._fit import Scheduler
    from tp_trainer._running._history import History
    from tp_trainer._running._loop import Loop
    from tp_trainer.loggers._named import LogSpec

__all__ = ["Runs"]


class Runs(RunStarter):
    """Trains a model, or lends the loop that does."""

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        *,
        step: Step,
        epochs: int | None = None,
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        val_step: Step | None = None,
        metrics: "Mapping[str, Metric] | None" = None,
        scheduler: "Scheduler | None" = None,
        scheduler_every: str = "epoch",
        monitor: str | None = None,
        steps_per_epoch: int | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: NonFinite = "raise",
        max_skipped: int = 10,
        step_timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        max_steps: int | None = None,
        max_time: float | str | None = None,
        val_every_steps: int | None = None,
        sanity_val_batches: int = 0,
        overfit_batches: int | None = None,
        restart_stream: bool = False,
        callbacks: Iterable["Callback | str"] = (),
        log: "LogSpec" = None,
        log_every_steps: int = 50,
        hyperparameters: Mapping[str, Any] | None = None,
        state: dict[str, Any] | None = None,
        shard: bool = True,
    ) -> "History":
        """Train ``model``, in place.

        Args:
            model: The plain model; it may be one that :meth:`prepare` returned.
            optimizer: An optimizer over its parameters.
            train_loader: Yields the batches. The batch size is that of the whole job: each data
                rank gets its share of every batch.
            step: ``step(model, batch)`` returns the loss, or a dict with "loss" and further
                numbers to be averaged and logged. If they are not means over samples, the dict has
                their number of units as "weight"; a metric may be a pair ``(mean, weight)``.
            epochs: How often to go through the loader; once by default, or until another limit is reached.
            val_loader: Evaluated after every epoch. Of several, by name, the results are named "name/...".
            val_step: The step for it; ``step`` by default.
            metrics: Metrics of the validation's whole set, as in :meth:`evaluate`; those that are numbers
                are among its results. What a training step returns under their names is left out.
            scheduler: A learning-rate scheduler.
            scheduler_every: Whether the scheduler moves on every "epoch" or every "step".
            monitor: What a scheduler looks at that looks at a metric (``ReduceLROnPlateau``): "val_f1",
                "loss" and so on; by default the validation loss, or without a validation the training loss.
            steps_per_epoch: How many batches make an epoch; needed for a loader without length.
            clip_norm: The largest global norm of the gradients.
            clip_value: The largest magnitude of an element of the gradients.
            nonfinite: Whether a loss or gradients that are NaN or infinite "raise", or "skip" the
                optimizer step, on all ranks.
            max_skipped: How many steps in a row may be skipped.
            step_timeout_s: After a step of so many seconds every rank writes its Python stack to
                stderr, and the job ends with status 124. The time until a batch is there counts
                too; writing a checkpoint does not. The first step may have to compile.
            save_to: A file that the model's state is written to after every epoch.
            checkpoint: Where and when to save the state of the run; a folder alone means after every
                epoch. SIGTERM, SIGUSR1 and Ctrl-C then end the run after a step, saved.
            resume: "auto" goes on from the newest whole checkpoint there, if there is one; a path
                goes on from that one.
            max_steps: After how many optimizer steps the run ends, those before a resume included.
            max_time: For how long this call trains: seconds, or text such as "1h30m".
            val_every_steps: Evaluate ``val_loader`` after so many optimizer steps, too.
            sanity_val_batches: On how many batches to try the validation before the first step.
            overfit_batches: Train on so many batches alone, the same ones in every epoch.
            restart_stream: Whether every epoch begins a stream (iterable data) anew; else it goes on in it.
            callbacks: What takes part in the run, or names of installed ones.
            log: Where numbers go: names of loggers ("csv", "jsonl", "tensorboard", "wandb", "mlflow",
                "aim"), or loggers, as of :mod:`tp_trainer.loggers`. With ``checkpoint`` the run's record
                is kept in its folder, too: ``tp report`` reads it.
            log_every_steps: After how many optimizer steps the mean loss is logged, and what callbacks have
                logged is read from the device.
            hyperparameters: What loggers are to know of the run, besides what the trainer knows itself.
            state: What else is saved and restored, by name: anything with ``state_dict`` and
                ``load_state_dict``, and plain values, lists and dicts, which are put back into this dict.
            shard: Whether the loaders are split over the data ranks.

        Returns:
            The record of each epoch.

        Raises:
            ConfigError: An argument has a wrong value, or the folder has checkpoints after the
                place where the run begins, or another run writes there.
            ModelError: The model is wrapped already.
            LoaderError: A loader has no length, ended early, or cannot be split over the ranks; or it
                is not at all the one that the checkpoint stands in.
            StepError: The step returned no usable loss, weight or metric.
            DisagreementError: Ranks were given different things, or some steps return a weight.
            NonFiniteLossError: The loss or the gradients are NaN or infinite; ``save_to`` and
                ``checkpoint`` keep the last good state.
            StateError: The checkpoint to resume from is damaged or does not fit.
            OSError: A file cannot be written.
            Interrupted: A signal asked the run to end; its state is saved.
        """
        from tp_trainer._metrics._metric import check_metrics
        from tp_trainer._running._limits import Limits
        from tp_trainer._running._settings import FitSettings, check_state
        from tp_trainer._steps._step import tell_of_evaluation_mode, telling_of_ended_iterators

        check_model("fit()", model)
        check_optimizer("fit()", optimizer)
        check_loader("train_loader", train_loader)
        settings = FitSettings(
            limits=Limits(
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                max_steps=max_steps,
                max_time=max_time,
                val_every_steps=val_every_steps,
                sanity_val_batches=sanity_val_batches,
                overfit_batches=overfit_batches,
                restart_stream=restart_stream,
            ),
            validates=val_loader is not None,
            step_timeout_s=step_timeout_s,
            checkpoint=checkpoint,
            resume=resume,
            state=check_state(state),
            events=self._events(callbacks),
            log=log,
            log_every_steps=log_every_steps,
            hyperparameters=hyperparameters,
            accumulate=self._accumulate,
            progress=self.progress,
            step=step,
            val_loader=val_loader,
            val_step=val_step,
            metrics=check_metrics(metrics),
            monitor=monitor,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            gradients=GradientRules(
                clip_norm=clip_norm, clip_value=clip_value, nonfinite=nonfinite, max_skipped=max_skipped
            ),
            save_to=save_to,
            shard=shard,
        )
        check_scheduler(scheduler, scheduler_every, optimizer, epochs=epochs)
        tell_of_evaluation_mode(model)
        try:
            with telling_of_ended_iterators(), ExitStack() as owned:
                return self._fit(model, optimizer, train_loader, settings, owned)
        except (RuntimeError, MemoryError) as error:
            tell_why(error, lambda: self.selection)
            raise

    def loop(
        self,
        batches: Iterable[Any],
        *,
        epochs: int | None = None,
        state: dict[str, Any] | None = None,
        validate: Callable[[], Mapping[str, float]] | None = None,
        steps_per_epoch: int | None = None,
        max_steps: int | None = None,
        max_time: float | str | None = None,
        val_every_steps: int | None = None,
        sanity_val_batches: int = 0,
        overfit_batches: int | None = None,
        restart_stream: bool = False,
        step_timeout_s: float | None = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        callbacks: Iterable["Callback | str"] = (),
        log: "LogSpec" = None,
        log_every_steps: int = 50,
        hyperparameters: Mapping[str, Any] | None = None,
        shard: bool = True,
    ) -> "Loop":
        """Return the loop that :meth:`fit` is built on, for custom training.

        Args:
            batches: The loader, prepared or not.
            epochs: How often to go through it; once by default, or until another limit is reached.
            state: What is saved and restored, by name: prepared models, their optimizers and schedulers,
                anything with ``state_dict`` and ``load_state_dict``, and plain values, lists and dicts, which
                are put back into this dict.
            validate: Returns the results of a validation, as :meth:`evaluate` does; called after every epoch.
                Those that are numbers are known as ``"val_..."`` to checkpoints and callbacks.
            steps_per_epoch: How many batches make an epoch; needed for a loader without length.
            max_steps: After how many optimizer steps the run ends, those before a resume included; a step is
                as many batches as the trainer accumulates.
            max_time: For how long this call trains: seconds, or text such as "1h30m".
            val_every_steps: Validate after so many optimizer steps, too.
            sanity_val_batches: Above 0, try the validation once before the first step.
            overfit_batches: Train on so many batches alone, the same ones in every epoch.
            restart_stream: Whether every epoch begins a stream (iterable data) anew; else it goes on in it.
            step_timeout_s: As in :meth:`fit`.
            checkpoint: As in :meth:`fit`; what it saves is ``state``, and how far the run is.
            resume: As in :meth:`fit`.
            callbacks: What takes part in the run, or names of installed ones.
            log: As in :meth:`fit`; it gets what ``loop.log(...)`` is given.
            log_every_steps: After how many optimizer steps that is read from the device and written.
            hyperparameters: As in :meth:`fit`.
            shard: Whether the loader is split over the data ranks.

        Returns:
            A context manager, and an iterator over the batches of all epochs.

        Raises:
            ConfigError: An argument has a wrong value.
            LoaderError: The loader has no length, or cannot be split over the ranks.
            DisagreementError: Ranks were given different things.

        Example:
            >>> with trainer.loop(loader, epochs=10, state={"model": model, "optimizer": optimizer}) as loop:
            ...     for batch in loop:
            ...         optimizer.zero_grad()
            ...         loss = trainer.run(step, model, batch)
            ...         trainer.backward(loss)
            ...         optimizer.step()
            ...         loop.log(loss=loss)  # doctest: +SKIP
        """
        from tp_trainer._running._limits import Limits
        from tp_trainer._running._settings import LoopSettings, check_state

        check_loader("batches", batches)
        settings = LoopSettings(
            limits=Limits(
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                max_steps=max_steps,
                max_time=max_time,
                val_every_steps=val_every_steps,
                sanity_val_batches=sanity_val_batches,
                overfit_batches=overfit_batches,
                restart_stream=restart_stream,
            ),
            validates=validate is not None,
            step_timeout_s=step_timeout_s,
            checkpoint=checkpoint,
            resume=resume,
            state=check_state(state),
            events=self._events(callbacks),
            log=log,
            log_every_steps=log_every_steps,
            hyperparameters=hyperparameters,
            accumulate=self._accumulate,
            progress=self.progress,
        )
        if validate is not None and not callable(validate):
            msg = f"validate must be a function that returns numbers by name, got {type(validate).__name__}"
            raise ConfigError(msg)
        self._open(by="loop()")
        train = self._loader(batches, shard=shard, watched=True)
        return self._start_loop(train, settings, validate)
