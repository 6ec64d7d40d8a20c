"""The trainer: one script for one device, many devices or many machines."""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core import DeviceSpec, LaunchEnvironment, resolve_devices
from tp_core.errors import ConfigError, StepError
from tp_core.internal import Progress, device_of_rank, shows_progress
from tp_core.plugins import (
    Job,
    LossReduction,
    PluginRegistry,
    Precision,
    PreparedLoader,
    Selection,
    Session,
    StepOutput,
    read_weight,
    registry,
)

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks._objects import (
    check_loader,
    check_model,
    check_no_others,
    check_optimizer,
    check_owner,
    check_preparable,
    check_scheduler,
)
from tp_trainer._checks._values import check_callable, check_loss, check_positive, check_seed
from tp_trainer._metrics._evaluation import evaluate, named_loaders
from tp_trainer._metrics._metric import Metric
from tp_trainer._metrics._metric_set import check_metrics
from tp_trainer._metrics._predictions import Predictions
from tp_trainer._metrics._validation import Validation, numbers_in
from tp_trainer._opening._choice import check_name
from tp_trainer._opening._lazy_session import LazySession
from tp_trainer._opening._options import Options, options_by_backend
from tp_trainer._steps._loaders import BatchShares, Epochs
from tp_trainer._steps._meter import loss_of
from tp_trainer._steps._optimizer_step import GradientRules, NonFinite, OptimizerStep
from tp_trainer._steps._precision import LossScaler, RunStep, Step, autocast, check_precision, in_precision
from tp_trainer._steps._weights import add_whole, total_weight

if TYPE_CHECKING:
    from tp_core.plugins import Callback

    from tp_trainer._running._events import Events
    from tp_trainer._running._fit import Scheduler
    from tp_trainer._running._history import History
    from tp_trainer._running._log import RunLog
    from tp_trainer._running._loop import Loop
    from tp_trainer._running._settings import FitSettings, LoopSettings
    from tp_trainer.loggers._named import LogSpec

# What only runs and files need is imported there: a trainer is made in programs that do not train, too.

__all__ = ["Trainer"]

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")


class Trainer:
    """Runs one training script on the best backend that is installed, and says why that one.

    Nothing is started before a model is there to be trained: the backend is chosen when
    :meth:`fit` or :meth:`prepare` is called. Who this process is (``rank``, ``device``) is known
    before. A trainer is a context manager; leaving it ends what it started.

    Args:
        backend: The name of the backend, or "auto" for the best that fits. The variable
            ``TP_BACKEND`` decides where it is "auto".
        devices: What to run on, as :func:`tp_core.resolve_devices` takes it. Under a launcher
            they are the devices of one host, one for each of its processes.
        seed: Seeds Python, numpy (if it is loaded) and torch now, and orders the data. ``None``
            leaves the generators alone; rank 0 then chooses how the data are ordered.
        loss: Whether a step's loss is the "mean" over its samples, or their "sum".
        precision: "fp32"; "bf16-mixed" or "fp16-mixed", where a step runs under autocast and fp16
            scales the loss; or "bf16-true", where the model and the batches are in bfloat16.
        accumulate: How many batches :meth:`fit` puts into one optimizer step. Gradients are weighed
            by samples, or by what the step says, as if the batches were one.
        compile: Whether models are compiled, in place, where the backend gains most from it.
        options: Options of backends, used if that one is chosen: ``DdpOptions(static_graph=True)``, a list
            of such objects, or a dict by backends' names, ``{"ddp": {"static_graph": True}}``.
        progress: Whether rank 0 shows how far a run is. "auto" is a bar on a terminal, and elsewhere a
            line for each epoch; with ``True`` there are lines in between, too; ``False`` shows nothing.
        plugins: The registry to choose from; that of the process by default.

    Raises:
        DeviceError: The devices do not exist.
        LaunchEnvironmentError: The launcher's variables are incomplete.
        ConfigError: An argument has a wrong value.
        SelectionError: No backend of that name is installed.
        PluginError: The plugin that brings the backend is broken or blocked.

    Example:
        >>> trainer = Trainer(seed=0)
        >>> trainer.fit(model, optimizer, loader, step=step, epochs=3)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        devices: DeviceSpec = "auto",
        seed: int | None = None,
        loss: LossReduction = "mean",
        precision: Precision = "fp32",
        accumulate: int = 1,
        compile: bool = False,
        options: Options | None = None,
        progress: Progress = "auto",
        plugins: PluginRegistry = registry,
    ) -> None:
        check_loss(loss)
        check_seed(seed)
        check_precision(precision)
        check_positive("accumulate", accumulate)
        check_name(plugins, backend)
        self.environment = LaunchEnvironment.read()
        shows_progress(progress)  # which checks it
        self.progress = progress
        self._seed = seed
        self._precision: Precision = precision
        self._accumulate = accumulate
        self._compile = compile
        self._may_step = False
        self._run: RunStep | None = None
        self._shares: BatchShares | None = None  # where there are several data ranks
        self._epochs = Epochs()
        self._scaler = LossScaler() if precision == "fp16-mixed" else None
        explicit = devices not in (None, "auto")
        self._devices = self._resolve(devices, explicit=explicit)
        job = Job(
            devices=self._devices,
            environment=self.environment,
            explicit_devices=explicit,
            loss=loss,
            precision=precision,
            accumulate=accumulate,
            compile=compile,
            options=options_by_backend(options, plugins),
        )
        self._lazy = LazySession(job, plugins, backend, seed=seed)
        self._prepared: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        if seed is not None:
            _seed_everything(seed)

    def _resolve(self, devices: DeviceSpec, *, explicit: bool) -> tuple[torch.device, ...]:
        found = resolve_devices(devices)
        if not self.environment.is_distributed:
            return found
        return (device_of_rank(found, self.environment, explicit=explicit),)

    # -- which backend ------------------------------------------------------------------------

    @property
    def selection(self) -> Selection:
        """Which backend was chosen and why, and why no other one; print it to see a table.

        Before a model is known it is what would be chosen for an unspecified model.
        """
        return self._lazy.selection

    @property
    def session(self) -> Session:
        """The running session; asking for it starts the job.

        Raises:
            SelectionError: No backend fits.
        """
        return self._open(by="trainer.session")

    @property
    def _session(self) -> Session | None:
        return self._lazy.current

    def _open(self, *models: nn.Module, by: str) -> Session:
        is_open = self._lazy.current is not None
        session = self._lazy.open(*models, by=by)
        if not is_open and session.data_size > 1:
            self._shares = BatchShares(session)
            if self._seed is not None:
                # Models are made alike on all ranks; dropout and augmentation must not be.
                _seed_everything(self._seed + session.data_rank * 1_000_003)
        return session

    # -- who am I -----------------------------------------------------------------------------

    # Known from the environment: asking must not choose a backend before the model is known.

    @property
    def device(self) -> torch.device:
        """Where this process computes; the first device where there are several."""
        return self._devices[0] if self._session is None else self._session.device

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.environment.rank if self._session is None else self._session.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its host, from 0."""
        return self.environment.local_rank if self._session is None else self._session.local_rank

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return self.environment.world_size if self._session is None else self._session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self.environment.is_main if self._session is None else self._session.is_main

    # -- one's own loop -----------------------------------------------------------------------

    @overload
    def prepare(self, one: T1, /, *, shard: bool = ..., training: bool = ...) -> T1: ...

    @overload
    def prepare(self, one: T1, two: T2, /, *, shard: bool = ..., training: bool = ...) -> tuple[T1, T2]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3, T4]: ...

    @overload
    def prepare(
        self, one: T1, two: T2, three: T3, four: T4, five: T5, /, *, shard: bool = ..., training: bool = ...
    ) -> tuple[T1, T2, T3, T4, T5]: ...

    @overload
    def prepare(self, *objects: Any, shard: bool = ..., training: bool = ...) -> Any: ...

    def prepare(self, *objects: Any, shard: bool = True, training: bool = True) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the backend.

        Args:
            *objects: What to prepare, in any order.
            shard: Whether loaders are split over the data ranks; ``False`` for loaders that
                give each rank its own samples already.
            training: Whether loaders are to train on: every rank then takes the same steps, with a
                stand-in sample where it has none of a batch. With ``False`` each sample is met once, by
                one rank, and no loss is weighed by it.

        Returns:
            The prepared objects in the same order; the object itself if it is one.

        Raises:
            ModelError: A model is wrapped already.
            LoaderError: A loader cannot be split over the ranks.
            ConfigError: An object is none of these, or an optimizer has another model's
                parameters.
            SelectionError: No backend fits, or that of the running session does not fit a model.

        Example:
            >>> model, optimizer, loader = trainer.prepare(model, optimizer, loader)
            ... for batch in loader:
            ...     optimizer.zero_grad()
            ...     trainer.backward(trainer.run(step, model, batch))
            ...     optimizer.step()  # doctest: +SKIP
        """
        for value in objects:
            check_preparable(value)
        models = [o for o in objects if isinstance(o, nn.Module)]
        self._open(*models, by="prepare()")
        for optimizer in objects:
            if isinstance(optimizer, Optimizer) and models:
                check_owner(optimizer, models)
        # A backend may give a model other parameters, which its optimizer then has to take over.
        in_order = sorted(range(len(objects)), key=lambda i: not isinstance(objects[i], nn.Module))
        done = {i: self._prepare(objects[i], shard=shard, training=training) for i in in_order}
        prepared = tuple(done[i] for i in range(len(objects)))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, value: Any, *, shard: bool, training: bool) -> Any:
        if isinstance(value, nn.Module):
            return self._prepare_model(value)
        if isinstance(value, Optimizer):
            if self._scaler is not None:
                value.register_step_pre_hook(self._refuse_scaled)
            return self.session.prepare_optimizer(value)
        if isinstance(value, LRScheduler | ReduceLROnPlateau | PreparedLoader):
            return value
        loader = self.session.prepare_loader(value, training=training, shard=shard)
        if self._shares is not None:
            self._shares.watch(loader, training=training)
        return loader

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model once; a prepared one is returned as it is."""
        check_model("the trainer", model)
        prepared = self._prepared.get(model)
        if prepared is None:
            session = self._open(model, by="the preparation of a model")
            if self._precision == "bf16-true":
                model.to(torch.bfloat16)
            prepared = session.prepare_model(model)
            if self._compile:
                session.compile_model(prepared)
            # Both the user's own module and the prepared one are known from now on.
            self._prepared[model] = self._prepared[prepared] = prepared
            self._lazy.note_fitting(prepared)
        return prepared

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model that ``make`` builds, prepared, without ever holding all of it where no rank has to.

        Its initial values are those that ``make()`` would draw on one device, element by element. A backend
        that splits parameters gives each rank its slices alone.

        Args:
            make: Builds the model on the CPU, ``lambda: Model(config)``; called once, on every rank.

        Returns:
            The model: for :meth:`fit`, for optimizers, for :meth:`load_model`.

        Example:
            >>> model = trainer.build(lambda: nn.Linear(4, 1))
            >>> optimizer = torch.optim.AdamW(model.parameters())
        """
        from tp_core.plugins import build_deferred, materialize

        is_low = self._precision == "bf16-true"
        model = build_deferred(lambda: make().to(torch.bfloat16) if is_low else make())
        check_model("build()", model)
        if not self._open(model, by="build()").takes_deferred_models:
            materialize(model)
        self._prepare_model(model)
        return model

    def run(self, step: Callable[..., StepOutput], *models_and_batch: Any) -> StepOutput:
        """Run ``step(model, batch)``, or ``step(first, second, ..., batch)``, in one's own loop.

        Under the trainer's precision, and on every device of this process at once, each with its part of
        the batch, where the backend has several.

        Args:
            step: Returns the loss, or a dict with "loss", and "weight" if it is not a mean over samples. It
                gets the models with their own methods and attributes.
            *models_and_batch: The prepared models, and the batch as a prepared loader yielded it, or a tuple
                of batches of several loaders where the backend does not run the step on parts.

        Returns:
            What the step returned, for the whole of this rank's batch: to be given to :meth:`backward`.

        Raises:
            ConfigError: There is no model, or no batch after the models.
        """
        *models, batch = models_and_batch or (None,)
        if not models or isinstance(batch, nn.Module):
            msg = "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)"
            raise ConfigError(msg)
        if len(models) == 1:
            if self._run is None:
                self._run = self._run_step()
            output = self._run(step, self._prepare_model(models[0]), batch)
        else:
            run = in_precision(self.session.run_several, self._precision, self.device)
            output = run(step, [self._prepare_model(model) for model in models], batch)
        if self._shares is not None and torch.is_grad_enabled():
            self._shares.note_loss(output, batch)
        return output

    def backward(
        self,
        loss: StepOutput,
        *,
        weight: float | Tensor | None = None,
        total: float | None = None,
        batch: Any = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of ``loss`` over the global batch to the parameters.

        A loss is a mean over the samples of its batch, or over as many units as its weight says. How many
        samples each rank has of the batch is known if the loss is what :meth:`run` returned, and else that
        of the prepared loader which is being iterated. With "fp16-mixed" the loss is scaled, and
        :meth:`update` makes the step.

        Args:
            loss: This rank's loss, or what a step returned: a dict with "loss", and maybe "weight".
            weight: Over how many units the loss is a mean on this rank. One of 0 counts as nothing, and
                the loss may then be NaN.
            total: How many units there are on all ranks, and in all batches of the optimizer step, where
                that is known already.
            batch: Which batch the loss is of, where several loaders are iterated at once.
            retain_graph: Whether another loss goes back through the same graph after this one.
            create_graph: Whether the gradients are to be differentiated in turn.

        Raises:
            ConfigError: Nothing was prepared.
            StepError: The loss or its weight is none; or it can be of several batches that lie differently
                on the ranks.

        Collectives: those of `Session.backward`; before them an all-reduce of one number, if there is a
        weight and no total.
        """
        if not isinstance(loss, Tensor):
            weight = loss.get("weight") if weight is None and isinstance(loss, Mapping) else weight
            loss = loss_of(loss, training=True)
        if self._session is None:
            msg = "backward() comes after the preparation: trainer.prepare(model, optimizer, loader)"
            raise ConfigError(msg)
        session, shares = self._session, self._shares
        if shares is not None:
            session.take_share(shares.of_loss(loss) if batch is None else shares.of_batch(batch))
        scale = 1.0 if self._scaler is None else self._scaler.scale
        graph = {"retain_graph": True, "create_graph": create_graph} if retain_graph or create_graph else {}
        if weight is None:
            session.backward(loss if scale == 1.0 else loss * scale, **graph)
            return
        share = session.share
        units = read_weight(weight) if share is None or share.samples else 0.0
        total = total_weight(session, units) if total is None else read_weight(total, name="total")
        add_whole(session, loss, units, total=total, scale=scale, **graph)

    def gather_for_metrics(self, value: Any, *, batch: Any = None) -> Any:
        """Return the rows of all data ranks, each sample once, on every rank: to compute metrics from.

        Of a rank that has a stand-in in place of a sample nothing is taken.

        Args:
            value: A tensor whose first dimension goes over the samples of this rank's batch, or a dict,
                list or tuple of such. A scalar is one row.
            batch: Which batch it is of, where several loaders are iterated at once.

        Returns:
            The same with the rows of all ranks, in the order of the global batch, without gradients.

        Raises:
            StepError: ``value`` holds something else than tensors; or the batch that it is of is not known.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes, then `Session.gather` for each tensor.
        """
        session, shares = self._open(by="gather_for_metrics()"), self._shares
        is_nothing = shares is not None and shares.holds_nothing(batch)
        from tp_trainer._steps._gathering import gather_rows

        return gather_rows(session, value, is_nothing=is_nothing)

    def all_gather(self, rows: Tensor, *, batch: Any = None) -> Tensor:
        """Return the rows of all data ranks, with gradients: for losses that compare samples.

        To be called in a step or in one's own loop, on all ranks alike. A loss that every rank computes
        from all rows, the same on all of them, then has the gradient of one device on the whole batch.

        Args:
            rows: Of this rank's samples, (samples, ...).
            batch: Which batch they are of, where several loaders are iterated at once in one's own loop.

        Returns:
            The rows of all ranks in the order of the global batch, (samples of all ranks, ...).

        Raises:
            StepError: The backend runs the step on parts of the batch that do not see each other; or there
                are no rows; or a rank without a sample of the batch does not take part.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes and two of `Session.gather`; in the backward pass one
        all-reduce.
        """
        session = self.session
        if session.runs_step_in_parts:
            msg = (
                f"the backend {self.selection.chosen.name!r} runs the step on each device's part of the "
                "batch, and the parts do not see each other's rows; take Trainer(backend='dp-gather'), whose "
                "steps see the whole batch, or one process per device: tp launch -n N script.py"
            )
            raise StepError(msg)
        from tp_trainer._steps._gathering import gather_with_gradients, has_nothing

        return gather_with_gradients(session, rows, is_nothing=has_nothing(session, self._shares, batch))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which one's own loop computes the loss, by the trainer's precision."""
        context = autocast(self._precision, self.device)
        return nullcontext() if context is None else context()

    def update(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> bool:
        """Make an optimizer step in one's own loop: unscale, clip, check, step.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
            clip_norm: The largest global norm of the gradients, or ``None``.
            clip_value: The largest magnitude of an element of them, or ``None``.

        Returns:
            Whether the step was made; with "fp16-mixed" one whose gradients overflowed is left out,
            on all ranks.

        Raises:
            ConfigError: A limit is not above 0.
            NonFiniteLossError: The gradients are NaN or infinite.

        Collectives: those of the session's ``clip_grad_norm``, if gradients are clipped or looked at.
        """
        check_optimizer("update()", optimizer)
        prepared = self._prepare_model(model)
        rules = GradientRules(clip_norm=clip_norm, clip_value=clip_value)
        update = OptimizerStep(self.session, prepared, optimizer, rules, scaler=self._scaler)
        self._may_step = True
        try:
            return update.finish()
        finally:
            self._may_step = False

    def _refuse_scaled(self, *_: object) -> None:
        if not self._may_step:
            msg = (
                "with precision='fp16-mixed' the gradients are scaled, and the optimizer must not take "
                "them as they are; call trainer.update(model, optimizer) instead of optimizer.step()"
            )
            raise ConfigError(msg)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients are added up without being reduced over ranks."""
        prepared = self._prepare_model(model)
        return self.session.no_sync(prepared)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most ``max_norm``; return the norm before."""
        prepared = self._prepare_model(model)
        return self.session.clip_grad_norm(prepared, max_norm)

    # -- the whole loop -----------------------------------------------------------------------

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
        metrics: Mapping[str, Metric] | None = None,
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
            callbacks: What takes part in the run, or names of installed ones.
            log: Where numbers go: names of loggers ("csv", "jsonl", "tensorboard", "wandb", "mlflow"), or
                loggers, as of :mod:`tp_trainer.loggers`. With ``checkpoint`` the run's record is kept in its
                folder, too: ``tp report`` reads it.
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
        from tp_trainer._running._limits import Limits
        from tp_trainer._running._settings import FitSettings, LoopSettings

        check_model("fit()", model)
        check_optimizer("fit()", optimizer)
        check_loader("train_loader", train_loader)
        rules = GradientRules(
            clip_norm=clip_norm, clip_value=clip_value, nonfinite=nonfinite, max_skipped=max_skipped
        )
        settings = FitSettings(
            step=step,
            val_loader=val_loader,
            metrics=check_metrics(metrics),
            monitor=monitor,
            val_step=val_step,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            gradients=rules,
            save_to=save_to,
            shard=shard,
        )
        looped = LoopSettings(
            limits=Limits.of(
                epochs=epochs,
                steps_per_epoch=steps_per_epoch,
                max_steps=max_steps,
                max_time=max_time,
                val_every_steps=val_every_steps,
                sanity_val_batches=sanity_val_batches,
                overfit_batches=overfit_batches,
            ),
            validates=val_loader is not None,
            step_timeout_s=step_timeout_s,
            checkpoint=checkpoint,
            resume=resume,
            accumulate=self._accumulate,
            progress=self.progress,
        )
        check_scheduler(scheduler, scheduler_every, optimizer)
        values, events = self._state_and_events(state, callbacks)
        self._open(model, by="fit()")
        logs = self._run_log(log, log_every_steps, looped, [optimizer], hyperparameters)
        return self._fit(model, optimizer, train_loader, settings, looped, values, events, logs)

    def _run_log(
        self,
        spec: "LogSpec",
        every_steps: int,
        looped: "LoopSettings",
        optimizers: Iterable[Optimizer],
        hyperparameters: Mapping[str, Any] | None,
    ) -> "RunLog":
        from tp_trainer._running._log import of_optimizer, plan_log

        checkpoints, limits = looped.checkpoints(), looped.limits
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
            spec,
            plugins=self._lazy.plugins,
            every_steps=every_steps,
            folder=None if checkpoints is None else Path(checkpoints.folder).absolute(),
            selection=self.selection,
            hyperparameters={**known, **(hyperparameters or {})},
        )

    def _state_and_events(
        self, state: dict[str, Any] | None, callbacks: Iterable["Callback | str"]
    ) -> "tuple[dict[str, Any], Events]":
        from tp_trainer._running._callbacks import find_callbacks
        from tp_trainer._running._events import Events
        from tp_trainer._running._starting import check_state

        return check_state(state), Events(*find_callbacks(callbacks, self._lazy.plugins))

    def _fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        settings: "FitSettings",
        looped: "LoopSettings",
        values: dict[str, Any],
        events: "Events",
        logs: "RunLog",
    ) -> "History":
        from tp_trainer._running._fit import Fit, fit, fit_duties
        from tp_trainer._running._starting import sort_state, start_loop
        from tp_trainer._running._watchdog import Watchdog

        session = self._open(model, by="fit()")
        check_owner(optimizer, [model])
        if session.world_size > 1:
            check_no_others(optimizer, model, "its gradients would differ between the ranks")
        if looped.checkpoints() is not None:
            check_no_others(optimizer, model, "its value would be in no checkpoint")
        save = self._saving(model, settings.save_to)
        model = self._prepare_model(model)
        optimizer_step = OptimizerStep(
            session,
            model,
            session.prepare_optimizer(optimizer),
            settings.gradients,
            accumulate=self._accumulate,
            scaler=self._scaler,
        )
        train = self._loader(train_loader, shard=settings.shard)
        self._epochs.go_on(train_loader, train)
        loaders = {
            name: self._loader(loader, shard=settings.shard, training=False)
            for name, loader in settings.val_loaders().items()
        }
        watchdog = Watchdog(session.job.environment, looped.step_timeout_s)
        work = Fit(
            settings=settings,
            optimizer_step=optimizer_step,
            run=self._run_step(),
            validation=Validation(
                run=watchdog.watch(self._run_step()),
                step=settings.val_step or settings.step,
                loaders=loaders,
                metrics=settings.metrics,
            )
            if loaders
            else None,
            after_epoch=save,
        )
        found = sort_state(
            values,
            prepared=self._prepared.get,
            scaler=self._scaler,
            models={"model": model},
            optimizers={"optimizer": optimizer_step.optimizer},
            schedulers={} if settings.scheduler is None else {"scheduler": settings.scheduler},
        )
        loop = start_loop(
            session,
            replace(looped, backend=self.selection.chosen.name),
            found,
            train,
            state=values,
            duties=fit_duties(work, train),
            events=events,
            facts=settings.facts(),
            watchdog=watchdog,
            logs=logs,
            optimizer_step=optimizer_step,
        )
        self._may_step = True
        try:
            return fit(loop, work, events)
        finally:
            self._may_step = False
            self._epochs.note(train_loader, train)

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
        step_timeout_s: float | None = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        callbacks: Iterable["Callback | str"] = (),
        log: "LogSpec" = None,
        log_every_steps: int = 50,
        hyperparameters: Mapping[str, Any] | None = None,
        shard: bool = True,
    ) -> "Loop":
        """Return the loop that :meth:`fit` is built on, for training of one's own.

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
        from tp_trainer._running._duties import Duties
        from tp_trainer._running._limits import Limits
        from tp_trainer._running._settings import LoopSettings
        from tp_trainer._running._starting import sort_state, start_loop
        from tp_trainer._running._watchdog import Watchdog

        check_loader("batches", batches)
        limits = Limits.of(
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            max_steps=max_steps,
            max_time=max_time,
            val_every_steps=val_every_steps,
            sanity_val_batches=sanity_val_batches,
            overfit_batches=overfit_batches,
        )
        settings = LoopSettings(
            limits=limits,
            validates=validate is not None,
            step_timeout_s=step_timeout_s,
            checkpoint=checkpoint,
            resume=resume,
            accumulate=self._accumulate,
            progress=self.progress,
        )
        if validate is not None and not callable(validate):
            msg = f"validate must be a function that returns numbers by name, got {type(validate).__name__}"
            raise ConfigError(msg)
        values, events = self._state_and_events(state, callbacks)
        session = self._open(by="loop()")
        optimizers = [value for value in values.values() if isinstance(value, Optimizer)]
        return start_loop(
            session,
            replace(settings, backend=self.selection.chosen.name),
            sort_state(values, prepared=self._prepared.get, scaler=self._scaler),
            self._prepare(batches, shard=shard, training=True),
            state=values,
            duties=Duties(validate=None if validate is None else lambda _, __: numbers_in(validate())),
            events=events,
            facts={},
            watchdog=Watchdog(session.job.environment, step_timeout_s),
            logs=self._run_log(log, log_every_steps, settings, optimizers, hyperparameters),
        )

    def _saving(self, model: nn.Module, path: str | os.PathLike[str] | None) -> Callable[[], None]:
        """Return what saves the model after every epoch, if there is a place that can be written to.

        Raises:
            ConfigError: ``path`` is not a path.
            OSError: No file can be written there; on every rank.

        Collectives: one broadcast, if there is a path.
        """
        if path is None:
            return lambda: None
        from tp_trainer._checkpoint._model_files import check_place

        check_place(self.session, path)
        # Absolute: wherever the process goes meanwhile.
        return partial(self.save_model, model, Path(path).absolute())

    def _run_step(self) -> RunStep:
        """Return what runs a step in the trainer's precision; the session's own way where it can."""
        return in_precision(self.session.run, self._precision, self.device)

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        step: Step,
        metrics: Mapping[str, Metric] | None = None,
        shard: bool = True,
    ) -> dict[str, Any]:
        """Return the means of what ``step`` returns over the samples of ``loader``, and metrics, by name.

        Each sample, or unit of the step's weights, counts once, whatever the number of ranks and the
        size of the last batch. Training goes on afterwards as if nothing had been.

        Args:
            model: The plain model, or the prepared one.
            loader: Yields the batches. Of several, by name, the results are named "name/...".
            step: ``step(model, batch)`` returns the loss, or a dict of numbers to be averaged, with or
                without "loss". Under a metric's name it returns the arguments of its ``update``: a tuple, a
                dict, or one value, which are not averaged.
            metrics: Objects with ``update``, ``compute`` and ``reset``, by name: of torchmetrics, torcheval,
                or :class:`FunctionMetric`. Each is fed with all samples in the order of the data, on every
                rank alike, and is left as it is then.
            shard: Whether the loader is split over the data ranks.

        Returns:
            The results: means and numbers of metrics as floats, larger results of metrics as tensors on
            the CPU; nothing for a loader without samples.

        Raises:
            ConfigError: A metric or a name cannot be used.
            StepError: The step returned what cannot be averaged, or nothing for a metric; or the metric
                raised an error.
        """
        check_model("evaluate()", model)
        check_callable("step", step)
        loaders, checked = named_loaders("loader", loader), check_metrics(metrics)
        for each in loaders.values():
            check_loader("loader", each)
        model = self._prepare_model(model)
        results: dict[str, Any] = {}
        for prefix, each in loaders.items():
            batches = self._loader(each, shard=shard, training=False)
            epoch = batches.next_epoch
            try:
                found = evaluate(self.session, self._run_step(), step, model, batches, checked)
            finally:
                batches.set_epoch(epoch)
            results |= {prefix + name: value for name, value in found.items()}
        return results

    def predict(
        self, model: nn.Module, loader: Iterable[Any], step: Step, *, shard: bool = True
    ) -> "Predictions":
        """Return what ``step`` returns for the samples of ``loader``, in their order and each once.

        Args:
            model: The plain model, or the prepared one. It is in evaluation mode and records no gradients.
            loader: Yields the batches.
            step: ``step(model, batch)`` returns values with a row for each sample of the batch: tensors,
                arrays or lists, alone or in dicts and tuples.
            shard: Whether the loader is split over the data ranks.

        Returns:
            What iterates over pieces of the predictions, on every rank; or call its ``collect()`` or
            ``save(path)``.

        Example:
            >>> def step(model, batch):
            ...     return {"class": model(batch[0]).argmax(1)}
            >>> trainer.predict(model, loader, step).save("classes.jsonl")  # doctest: +SKIP
        """
        check_model("predict()", model)
        check_loader("loader", loader)
        check_callable("step", step)
        model = self._prepare_model(model)
        batches = self._loader(loader, shard=shard, training=False)
        return Predictions(self.session, self._run_step(), step, model, batches)

    def _loader(self, loader: Iterable[Any], *, shard: bool, training: bool = True) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            return loader
        return self.session.prepare_loader(loader, training=training, shard=shard)

    # -- files --------------------------------------------------------------------------------

    def save_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the model's state, with the plain model's names; call it on every rank.

        A crash while it is written leaves the old file as it was.

        Raises:
            OSError: The file cannot be written; on every rank.

        Collectives: the backend's gathering of the state, one broadcast.
        """
        from tp_trainer._checkpoint._model_files import save_model

        prepared = self._prepare_model(model)
        save_model(self.session, prepared, path)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Load what :meth:`save_model` wrote, on this or another backend; call it on every rank.

        So are weights that :meth:`export` wrote, or another program: a safetensors file, an index of several,
        or their folder; and the folder of a checkpoint, of a run or of ``tp_shard.save_sharded``.

        Raises:
            FileNotFoundError: The file does not exist.
            StateError: The file is damaged, or is of another model; the model is untouched.
        """
        from tp_trainer._checkpoint._model_files import load_model

        prepared = self._prepare_model(model)
        load_model(self.session, prepared, path)

    def export(
        self, model: nn.Module, path: str | os.PathLike[str], *, max_file_nbytes: int | None = None
    ) -> None:
        """Write the weights as safetensors files, which are loaded without tp; call it on every rank.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it into the plain model. Tied
        weights are written under each of their names. A crash while it is written leaves the old file
        as it was. One tensor at a time is whole in memory, if the backend splits them.

        Args:
            model: The model.
            path: The file, ``model.safetensors``.
            max_file_nbytes: The largest size of a file, from which on there are several, such as
                ``model-00001-of-00003.safetensors``, and an index, as Hugging Face's libraries have it.

        Raises:
            ConfigError: There are several files, and ``path`` does not end in ".safetensors".
            OSError: A file cannot be written; on every rank.
            StateError: The model's state holds something that is not a tensor.

        Collectives: the backend's gathering of the state, one broadcast.
        """
        prepared = self._prepare_model(model)
        from tp_trainer._checkpoint._model_files import export_model

        export_model(self.session, prepared, path, max_file_nbytes=max_file_nbytes)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """End what was started; calling it again does nothing."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _seed_everything(seed: int) -> None:
    from tp_trainer._checkpoint import _generators

    _generators.seed_everything(seed)
