"""The trainer: one script for one device, many devices or many machines."""

import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core import (
    DeviceSpec,
    Job,
    LaunchEnvironment,
    LossReduction,
    Precision,
    PreparedLoader,
    Selection,
    Session,
    StepOutput,
    device_of_rank,
    resolve_devices,
    select,
)
from tp_core.errors import ConfigError, SelectionError
from tp_core.plugins import PluginRegistry, registry

from tp_trainer._arguments import (
    as_checkpoints,
    check_owner,
    check_positive,
    check_scheduler,
    check_seconds,
)
from tp_trainer._checkpoint import Checkpoints, Keeper, generators
from tp_trainer._fit import RunStep, Scheduler, Step, evaluate
from tp_trainer._handshake import agree
from tp_trainer._model_files import export_model, load_model, save_model
from tp_trainer._opening import open_session
from tp_trainer._precision import LossScaler, autocast, check_precision, to_bfloat16
from tp_trainer._progress import History, Reporter
from tp_trainer._run import Run
from tp_trainer._update import NonFinite, Update
from tp_trainer._watchdog import Watchdog

__all__ = ["Trainer"]


class Trainer:
    """Runs one training script on the best backend that is installed, and says why that one.

    Nothing is started before a model is there to be trained: the backend is chosen when
    :meth:`fit` or :meth:`prepare` is called, or when something is asked that only a running job
    knows (``device``, ``rank``). A trainer is a context manager; leaving it ends what it started.

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
            by samples, as if the batches were one.
        compile: Whether models are compiled, in place, where the backend gains most from it.
        options: Options for backends by name, used if that one is chosen:
            ``{"ddp": {"static_graph": True}}``.
        progress: Whether rank 0 shows a progress bar, or plain lines where there is no terminal.
        plugins: The registry to choose from; that of the process by default.

    Raises:
        DeviceError: The devices do not exist.
        LaunchEnvironmentError: The launcher's variables are incomplete.
        ConfigError: An argument has a wrong value.

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
        compile: bool = False,  # noqa: A002 - torch's name for it
        options: Mapping[str, Mapping[str, Any]] | None = None,
        progress: bool = True,
        plugins: PluginRegistry = registry,
    ) -> None:
        if loss not in {"mean", "sum"}:
            msg = f"loss must be 'mean' or 'sum', got {loss!r}"
            raise ConfigError(msg)
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            msg = f"seed must be None or a whole number from 0, got {seed!r}"
            raise ConfigError(msg)
        check_precision(precision)
        check_positive("accumulate", accumulate)
        self.environment = LaunchEnvironment.read()
        self.progress = progress
        self._backend_name = backend
        self._plugins = plugins
        self._seed = seed
        self._loss: LossReduction = loss
        self._precision: Precision = precision
        self._accumulate = accumulate
        self._compile = compile
        self._may_step = False
        self._scaler = LossScaler() if precision == "fp16-mixed" else None
        self._options = {} if options is None else dict(options)
        self._explicit_devices = devices not in (None, "auto")
        self._devices = self._resolve(devices)
        self._selection: Selection | None = None
        self._session: Session | None = None
        self._prepared: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        if seed is not None:
            generators.seed_everything(seed)

    def _resolve(self, devices: DeviceSpec) -> tuple[torch.device, ...]:
        found = resolve_devices(devices)
        if not self.environment.is_distributed:
            return found
        return (device_of_rank(found, self.environment, explicit=self._explicit_devices),)

    # -- which backend ------------------------------------------------------------------------

    @property
    def selection(self) -> Selection:
        """Who was chosen and why, and why no other one; print it to see a table.

        Before a model is known it is what would be chosen for a model of no particular kind.
        """
        if self._selection is None:
            return self._select(None, seed=0)
        return self._selection

    @property
    def session(self) -> Session:
        """The running session; asking for it starts the job."""
        return self._open(None)

    def _select(self, model: nn.Module | None, *, seed: int) -> Selection:
        job = self._job(model, seed)
        installed = self._plugins.backends()
        names = {c.item.name for c in installed}
        for name in self._options:
            if name not in names:
                msg = (
                    f"options are given for backend {name!r}, which is not installed; "
                    f"installed: {', '.join(sorted(map(repr, names)))}"
                )
                raise ConfigError(msg)
        try:
            return select(job, installed, name=self._backend_name)
        except SelectionError as error:
            self._explain_broken(error)
            raise

    def _explain_broken(self, error: SelectionError) -> None:
        """Name a broken plugin as the cause, if it is what was asked for."""
        wanted = self._backend_name
        if wanted == "auto":
            wanted = os.environ.get("TP_BACKEND", "auto")
        self._plugins.require(wanted)
        for broken in self._plugins.broken():
            error.add_note(str(broken))

    def _job(self, model: nn.Module | None, seed: int) -> Job:
        return Job(
            devices=self._devices,
            environment=self.environment,
            explicit_devices=self._explicit_devices,
            model=model,
            seed=seed,
            loss=self._loss,
            precision=self._precision,
            accumulate=self._accumulate,
            compile=self._compile,
            options=self._options,
        )

    def _open(self, model: nn.Module | None) -> Session:
        if self._session is not None:
            return self._session
        seed = torch.initial_seed() if self._seed is None else self._seed
        selection = self._select(model, seed=seed)
        facts = {
            "kind of loss": self._loss,
            "seed": self._seed,
            "precision": self._precision,
            "accumulate": self._accumulate,
            "compile": self._compile,
            "version of torch": torch.__version__,
        }
        session = open_session(selection, self._job(model, seed), facts)
        self._selection, self._session = selection, session
        if self._seed is not None and session.data_size > 1:
            # Models are made alike on all ranks; dropout and augmentation must not be.
            generators.seed_everything(self._seed + session.data_rank * 1_000_003)
        return session

    # -- who am I -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.session.device

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.session.rank

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return self.session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self.session.is_main

    # -- one's own loop -----------------------------------------------------------------------

    def prepare(self, *objects: Any, shard: bool = True) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the backend.

        Args:
            *objects: What to prepare, in any order.
            shard: Whether loaders are split over the data ranks; ``False`` for loaders that
                give each rank its own samples already.

        Returns:
            The prepared objects in the same order; the object itself if it is one.

        Raises:
            ModelError: A model is wrapped already.
            LoaderError: A loader cannot be split over the ranks.
            ConfigError: An object is none of these, or an optimizer has another model's
                parameters.

        Example:
            >>> model, optimizer, loader = trainer.prepare(model, optimizer, loader)
            ... for batch in loader:
            ...     optimizer.zero_grad()
            ...     trainer.backward(step(model, batch))
            ...     optimizer.step()  # doctest: +SKIP
        """
        models = [o for o in objects if isinstance(o, nn.Module)]
        self._open(models[0] if models else None)
        for optimizer in objects:
            if isinstance(optimizer, Optimizer) and models:
                check_owner(optimizer, models)
        prepared = tuple(self._prepare(o, shard=shard) for o in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, value: Any, *, shard: bool) -> Any:
        if isinstance(value, nn.Module):
            return self._prepare_model(value)
        if isinstance(value, Optimizer):
            if self._scaler is not None:
                value.register_step_pre_hook(self._refuse_scaled)
            return self.session.prepare_optimizer(value)
        if isinstance(value, LRScheduler | ReduceLROnPlateau | PreparedLoader):
            return value
        if isinstance(value, Iterable):
            return self.session.prepare_loader(value, shard=shard)
        msg = (
            "prepare() takes models, optimizers, loaders and schedulers, got "
            f"{type(value).__name__}: {value!r}"
        )
        raise ConfigError(msg)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model once; a prepared one is returned as it is."""
        session = self._open(model)
        prepared = self._prepared.get(model)
        if prepared is None:
            if self._precision == "bf16-true":
                model.to(torch.bfloat16)
            prepared = session.prepare_model(model)
            if self._compile:
                session.compile_model(prepared)
            # Both the user's own module and the prepared one are known from now on.
            self._prepared[model] = self._prepared[prepared] = prepared
        return prepared

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` over the global batch to the parameters.

        Where a batch's samples lie unevenly on the ranks, they are weighed as the batch that the
        prepared loader yielded last. With "fp16-mixed" the loss is scaled, and :meth:`update` makes
        the step.
        """
        self.session.backward(loss if self._scaler is None else loss * self._scaler.scale)

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
        """Make an optimizer step in one's own loop: unscale, clip, look, step.

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
        update = Update(
            self.session,
            self._prepare_model(model),
            optimizer,
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=self._scaler,
        )
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
        return self.session.no_sync(model)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most ``max_norm``; return the norm before."""
        return self.session.clip_grad_norm(self._prepare_model(model), max_norm)

    # -- the whole loop -----------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        *,
        step: Step,
        epochs: int = 1,
        val_loader: Iterable[Any] | None = None,
        val_step: Step | None = None,
        scheduler: Scheduler | None = None,
        scheduler_every: str = "epoch",
        steps_per_epoch: int | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: NonFinite = "raise",
        max_skipped: int = 10,
        step_timeout_s: float | None = None,
        save_to: str | os.PathLike[str] | None = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        shard: bool = True,
    ) -> History:
        """Train ``model``, in place.

        Args:
            model: The plain model; it may be one that :meth:`prepare` returned.
            optimizer: An optimizer over its parameters.
            train_loader: Yields the batches. The batch size is that of the whole job: each data
                rank gets its share of every batch.
            step: ``step(model, batch)`` returns the loss, or a dict with "loss" and further
                numbers to be averaged and logged.
            epochs: How often to go through the loader.
            val_loader: Evaluated after every epoch.
            val_step: The step for it; ``step`` by default.
            scheduler: A learning-rate scheduler. One that looks at a metric
                (``ReduceLROnPlateau``) gets the validation loss, or else the training loss.
            scheduler_every: Whether the scheduler moves on every "epoch" or every "step".
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
            shard: Whether the loaders are split over the data ranks.

        Returns:
            What each epoch came to.

        Raises:
            ConfigError: An argument has a wrong value, or the folder has checkpoints after the
                place where the run begins.
            ModelError: The model is wrapped already.
            LoaderError: A loader has no length, ended early, or cannot be split over the ranks; or it
                is not at all the one that the checkpoint stands in.
            StepError: The step returned no usable loss.
            NonFiniteLossError: The loss or the gradients are NaN or infinite; ``save_to`` and
                ``checkpoint`` keep the last good state.
            StateError: The checkpoint to resume from is damaged or does not fit.
            OSError: A file cannot be written.
            Interrupted: A signal asked the run to end; its state is saved.
        """
        check_positive("epochs", epochs)
        if steps_per_epoch is not None:
            check_positive("steps_per_epoch", steps_per_epoch)
        check_seconds("step_timeout_s", step_timeout_s)
        check_scheduler(scheduler, scheduler_every)
        checkpoint = as_checkpoints(checkpoint, resume, validates=val_loader is not None)
        session = self._open(model)
        check_owner(optimizer, [model])
        model = self._prepare_model(model)
        optimizer = session.prepare_optimizer(optimizer)
        train_batches = self._loader(train_loader, shard=shard)
        val_batches = None if val_loader is None else self._loader(val_loader, shard=shard, training=False)
        steps = len(train_batches) if steps_per_epoch is None else steps_per_epoch
        check_positive("the number of batches in the loader", steps)
        update = Update(
            session,
            model,
            optimizer,
            accumulate=self._accumulate,
            clip_norm=clip_norm,
            clip_value=clip_value,
            scaler=self._scaler,
            nonfinite=nonfinite,
            max_skipped=max_skipped,
        )
        agree(
            session,
            {
                "number of epochs": epochs,
                "number of steps in an epoch": steps,
                "scheduler_every": scheduler_every,
                "clip_norm": clip_norm,
                "clip_value": clip_value,
                "nonfinite": nonfinite,
                "max_skipped": max_skipped,
                "validation": val_loader is not None,
                "save_to": save_to is not None,
                "checkpoint": None if checkpoint is None else replace(checkpoint, folder=""),
                "resume": resume is not None,
            },
        )
        watchdog = Watchdog(self.environment, step_timeout_s)
        run = Run(
            session=session,
            backend=self.selection.chosen.name,
            run_step=watchdog.watch(self._run_step()),
            step=step,
            val_step=val_step or step,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            train=train_batches,
            val=val_batches,
            epochs=epochs,
            steps=steps,
            accumulate=self._accumulate,
            tolerate=nonfinite == "skip",
            update=update,
            scaler=self._scaler,
            reporter=Reporter(enabled=self.progress and session.is_main, epochs=epochs),
            keeper=None if checkpoint is None else Keeper(checkpoint, session),
            watchdog=watchdog,
            after_epoch=partial(self.save_model, model, save_to) if save_to is not None else _nothing,
        )
        self._may_step = True
        try:
            return run.go(None if resume is None else Path(resume) if resume != "auto" else "auto")
        finally:
            self._may_step = False

    def _run_step(self) -> RunStep:
        """Return what runs a step in the trainer's precision; the session's own way where it can."""
        run, precision = self.session.run, self._precision
        if precision == "bf16-true":
            return lambda step, model, batch: run(step, model, to_bfloat16(batch))
        context = autocast(precision, self.device)
        if context is None:
            return run

        def run_under_autocast(step: Step, model: nn.Module, batch: Any) -> StepOutput:
            with context():
                return run(step, model, batch)

        return run_under_autocast

    def evaluate(
        self, model: nn.Module, loader: Iterable[Any], *, step: Step, shard: bool = True
    ) -> dict[str, float]:
        """Return the means of what ``step`` returns over the samples of ``loader``, by name.

        Each sample counts once, whatever the number of ranks and the size of the last batch.
        """
        model = self._prepare_model(model)
        return evaluate(
            self.session, self._run_step(), step, model, self._loader(loader, shard=shard, training=False)
        )

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
        save_model(self.session, self._prepare_model(model), path)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Load what :meth:`save_model` wrote, on this or another backend; call it on every rank.

        Raises:
            FileNotFoundError: There is no such file.
            StateError: The file is damaged, or is of another model; the model is untouched.
        """
        load_model(self.session, self._prepare_model(model), path)

    def export(self, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
        """Write the weights as a safetensors file, which is loaded without tp; call it on every rank.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it into the plain model. Tied
        weights are written under each of their names. A crash while it is written leaves the old file
        as it was.

        Args:
            path: The file.
            model: Which model; the one that was trained or prepared, where it is the only one.

        Raises:
            ConfigError: There is no model, or several and none was named.
            OSError: The file cannot be written; on every rank.
            StateError: The model's state holds something that is no tensor.

        Collectives: the backend's gathering of the state, one broadcast.
        """
        if model is None:
            known = {id(prepared): prepared for prepared in self._prepared.values()}
            if len(known) != 1:
                msg = (
                    f"export() needs to know the model: {len(known)} were prepared; give export(path, model)"
                )
                raise ConfigError(msg)
            (model,) = known.values()
        export_model(self.session, self._prepare_model(model), path)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """End what was started; calling it again does nothing."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    """Do nothing."""
