"""Lightning's ``Trainer`` on tp's: it trains the ``LightningModule`` of a program as it is.

::

    fit(module, datamodule)
      prepare_data, setup, configure_model, configure_optimizers     Setup
      Trainer.loop of tp: order, position, checkpoints, signals, limits, loggers
        training_step            Trainer.run, and Trainer.backward; with manual optimization as it is written
        log, log_dict            Results: means over the samples of all ranks
        validation_step, ...     after an epoch, or between two steps; each sample counts once

Nothing is imported from Lightning: any module with these methods is trained. A batch size is the whole job's,
as everywhere in tp, so that any number of devices gives the numbers of one.
"""

import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core import LaunchEnvironment, available_devices, tree_map
from tp_core.data import PreparedLoader, count_samples
from tp_core.errors import ConfigError, StepError
from tp_core.internal import atomic_part, hook_steps, those_known
from tp_core.plugins import Callback, RunView

from tp_trainer import (
    Checkpoints,
    DdpOptions,
    Limits,
    LogOptions,
    Loop,
    Validation,
    find_checkpoint,
)
from tp_trainer import Trainer as OwnTrainer
from tp_trainer import loggers as own_loggers
from tp_trainer.callbacks import EarlyStopping, LearningRateMonitor

__all__ = ["Trainer"]

_Stage = Literal["fit", "validate", "test", "predict"]

# Arguments of Lightning's Trainer that are not here, and what to write instead.
_ELSEWHERE = {
    "barebones": "Trainer(logger=False)",
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "fast_dev_run": "tp_trainer.tuning.dry_run(trainer, model, optimizer, loader, step=step), or max_steps=2",
    "min_epochs": "a callback that sets trainer.should_stop",
    "min_steps": "a callback that sets trainer.should_stop",
    "model_registry": "trainer.save_checkpoint(path)",
    "num_nodes": "tp launch --nnodes 2 (pip install tp-launch)",
    "plugins": "Trainer(precision='bf16-mixed'), or a backend",
    "profiler": "callbacks=[tp_trainer.callbacks.Profiler('profile')]",
    "reload_dataloaders_every_n_epochs": "a dataset with set_epoch, or a sampler with it",
    "use_distributed_sampler": "nothing: tp splits the batches over the ranks itself",
}
_WITHOUT_EFFECT = ("enable_model_summary", "enable_autolog_hparams", "inference_mode")
# Options of Lightning's callbacks that are here for some values, by their fields: those, and what to write.
_THRESHOLDS = ((None,), "call run.stop() in the on_validation_end of a tp_trainer.Callback")
_CALLBACK_OPTIONS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "EarlyStopping": {
        "stopping_threshold": _THRESHOLDS,
        "divergence_threshold": _THRESHOLDS,
        "strict": ((True,), "log the metric in each validation, or epoch"),
    },
    "LearningRateMonitor": {
        "logging_interval": ((None, "step"), "leave it out: the rates are logged with the steps"),
        "log_momentum": ((False,), "run.log(momentum=...) in the on_step_end of a tp_trainer.Callback"),
        "log_weight_decay": ((False,), "run.log(decay=...) in the on_step_end of a tp_trainer.Callback"),
    },
    "ModelCheckpoint": {
        "filename": ((None,), "leave it out: names have the step; find_checkpoint(folder, best=...)"),
        "auto_insert_metric_name": ((True,), "leave it out: names have the step"),
        "_enable_version_counter": ((True,), "leave it out: names have the step"),
        "save_last": ((None, False, True), "save_last=True: the newest one is kept, under its own name"),
        "save_top_k": ((-1, 0, 1), "save_top_k=1, the best one beside the newest, or -1, all of them"),
        "save_weights_only": ((False,), "trainer.save_checkpoint(path), after fit()"),
        "save_on_exception": ((False,), "every_n_train_steps=..., or train_time_interval=..."),
        "_save_on_train_epoch_end": ((None, True), "leave it out: an epoch is saved after its validation"),
    },
}
_NOT_NEEDED = ("ModelSummary", "ProgressBar", "RichModelSummary")
_STRATEGIES = {
    "auto": "ddp",
    "ddp": "ddp",
    "ddp_find_unused_parameters_true": "ddp",
    "ddp_spawn": "ddp",
    "ddp_notebook": "ddp",
    "fsdp": "fsdp",
}
_PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "fp16-mixed",
    "16-mixed": "fp16-mixed",
    "bf16-true": "bf16-true",
}


class Trainer:
    """Trains, validates, tests and predicts with a ``LightningModule``, on tp's sessions.

    Args:
        accelerator: "auto", "cpu", "gpu" or "cuda".
        strategy: "auto", "ddp", "ddp_find_unused_parameters_true" or "fsdp", in a launcher's processes.
        devices: "auto", or the number of processes that a launcher started on this host.
        precision: 32, "bf16-mixed", "bf16-true" or "16-mixed".
        logger: ``True`` or ``None`` for none but the run's own, names of tp's loggers, or loggers of tp. In
            place of Lightning's CSV, TensorBoard and Weights & Biases loggers tp's write.
        callbacks: Callbacks of tp, and callbacks with Lightning's hooks. Lightning's ``EarlyStopping``,
            ``LearningRateMonitor`` and ``ModelCheckpoint`` become tp's; options of theirs that are not
            here are refused.
        max_epochs: The number of epochs; 1000 without ``max_steps``, as there.
        max_steps: The number of optimizer steps; -1 for no limit.
        max_time: The time after which the run ends: text, seconds, or a ``timedelta``.
        limit_train_batches: The number of batches of an epoch, or a fraction of them.
        limit_val_batches: As for training, of each loader of a validation.
        limit_test_batches: As for training, of each loader of a test.
        limit_predict_batches: As for training, of each loader of predictions.
        overfit_batches: The number of batches that each epoch repeats.
        val_check_interval: Validate after this many batches, or after a fraction of an epoch.
        check_val_every_n_epoch: Validate every this many epochs.
        num_sanity_val_steps: How many batches to validate before training; 0 here.
        log_every_n_steps: How often loggers get numbers.
        enable_checkpointing: ``False`` writes no checkpoints.
        enable_progress_bar: ``False`` shows no progress.
        accumulate_grad_batches: The number of batches in an optimizer step.
        gradient_clip_val: The largest norm of the gradients, or element of them.
        gradient_clip_algorithm: "norm" or "value".
        sync_batchnorm: Whether batch norms see the rows of all ranks.
        default_root_dir: A folder: each run keeps its checkpoints in a new folder "version_0" of it.
        checkpoint: As for ``fit`` of tp's trainer; ``ckpt_path="last"`` resumes from it.
        backend: The name of a backend of tp, in place of ``strategy``.
        options: Options of backends, as for tp's trainer.
        seed: As for tp's trainer.
        **others: Arguments of Lightning that are not here; what to write instead is in the error.

    Raises:
        ConfigError: An argument has a wrong value, or is not here.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: Any = "auto",
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        max_time: Any = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        overfit_batches: int = 0,
        val_check_interval: float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        sync_batchnorm: bool = False,
        default_root_dir: Any = None,
        checkpoint: Any = None,
        backend: str | None = None,
        options: Any = None,
        seed: int | None = None,
        **others: Any,
    ) -> None:
        _refuse_arguments(others)
        own, self.own_callbacks, self.checkpoint_callback = _sort_callbacks(callbacks)
        self.callbacks: list[Any] = own
        found = self.checkpoint_callback and _checkpoints(self.checkpoint_callback)
        if found and (checkpoint is not None or enable_checkpointing is False):
            given = "enable_checkpointing=False" if checkpoint is None else "checkpoint="
            msg = f"{given} and a ModelCheckpoint contradict each other; give one of them"
            raise ConfigError(msg)
        environment = LaunchEnvironment.read()
        _check_devices(devices, environment)
        self.max_epochs = 1000 if max_epochs is None and max_steps == -1 else max_epochs
        self.max_steps = max_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        self.log_every_n_steps = log_every_n_steps or 50
        self.default_root_dir = default_root_dir
        self.num_sanity_val_steps = num_sanity_val_steps or 0
        self._batch_limits: dict[str, float | None] = {
            "fit": limit_train_batches,
            "validate": limit_val_batches,
            "test": limit_test_batches,
            "predict": limit_predict_batches,
        }
        self._limits = {
            "epochs": None if self.max_epochs == -1 else self.max_epochs,
            "max_steps": None if max_steps == -1 else max_steps,
            "max_time": _time_of(max_time),
            "overfit_batches": overfit_batches or None,
        }
        self._val_interval, self._val_epochs = val_check_interval, check_val_every_n_epoch or 1
        self._log = _loggers(logger)
        self._checkpoint = None
        if enable_checkpointing is not False:
            self._checkpoint = checkpoint or found or (default_root_dir and _next_version(default_root_dir))
        name = _backend_name(strategy, backend, environment)
        if options is None and name == "ddp":
            unused = strategy == "ddp_find_unused_parameters_true"
            options = DdpOptions(find_unused_parameters=unused, sync_batchnorm=sync_batchnorm)
        self._precision = _precision(precision)
        self._own = OwnTrainer(
            backend=name,
            devices=_devices(accelerator, environment),
            precision=self._precision,
            accumulate=accumulate_grad_batches,
            options=options,
            seed=seed,
            progress=False if enable_progress_bar is False else "auto",
        )
        self.training = self.validating = self.testing = self.predicting = self.sanity_checking = False
        self.barebones = False
        self.fast_dev_run = False
        self.datamodule: Any = None
        self.model: Any = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[_Schedule] = []
        self.train_dataloader: Any = None
        self.results = _Results()
        self.global_step = 0
        self._loop: Loop | None = None
        self._prepared: nn.Module | None = None

    # -- what a module reads --------------------------------------------------------------------------

    @property
    def session(self) -> Any:
        """The session of tp."""
        return self._own.session

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0."""
        return 0 if self._loop is None else self._loop.epoch - 1

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest values of all that was logged."""
        return self.results.newest

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank 0."""
        return self._own.is_main

    @property
    def global_rank(self) -> int:
        """The rank of this process, from 0."""
        return self._own.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host, from 0."""
        return self._own.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self._own.world_size

    num_devices = world_size

    @property
    def lightning_module(self) -> Any:
        """The module that is trained."""
        return self.model

    @property
    def logger(self) -> "_LoggerView":
        """What ``self.logger`` of a module logs numbers with."""
        return _LoggerView(self)

    @property
    def loggers(self) -> list[Any]:
        """Return no loggers, as tp's take numbers alone."""
        return []

    @property
    def num_training_batches(self) -> float:
        """The number of batches of an epoch."""
        if self._loop is not None:
            return self._loop.steps_per_epoch
        try:
            length = len(self.train_dataloader)
        except TypeError:
            return math.inf
        return _cut(length, self._batch_limits["fit"])

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps of the run."""
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        epochs = math.inf if self._limits["epochs"] is None else self._limits["epochs"]
        most = math.inf if self._limits["max_steps"] is None else self._limits["max_steps"]
        return min(steps * epochs, most)

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this step; a module or callback may set it."""
        return self._loop is not None and self._loop.ending is not None

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop and self._loop is not None:
            self._loop.stop("should_stop was set")

    # -- the four calls -------------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
    ) -> None:
        """Train a module.

        Args:
            model: The ``LightningModule``.
            train_dataloaders: The loader; by default the datamodule's or the module's.
            val_dataloaders: A loader, or several in a list.
            datamodule: A ``LightningDataModule``.
            ckpt_path: "last" resumes from the newest checkpoint of ``checkpoint``, if there is one; a path
                from that checkpoint of tp.

        Raises:
            ConfigError: The module lacks a method, or has one that is not here.
            StepError: A step returned no loss.
        """
        _check_module(model, ("training_step", "configure_optimizers"))
        with self._attached(model, train_dataloaders, datamodule, "fit") as data:
            train = data.loader("train_dataloader", train_dataloaders)
            if not hasattr(train, "__iter__") or isinstance(train, Mapping | list | tuple):
                msg = (
                    f"training takes one loader, got {type(train).__name__}; with several datasets, give the "
                    "loader of a dataset that returns a sample of each"
                )
                raise ConfigError(msg)
            self.train_dataloader = train
            validation = data.loaders("val_dataloader", val_dataloaders, optional=True)
            self._set_up(model)
            self._train(model, train, validation, ckpt_path)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Return what ``validation_step`` logs, for each loader."""
        return self._evaluate_alone("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> list[dict[str, float]]:
        """Return what ``test_step`` logs, for each loader."""
        return self._evaluate_alone("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool = True,
        ckpt_path: Any = None,
    ) -> list[Any] | None:
        """Return what ``predict_step`` returns, for each batch; of tensors the rows of all ranks."""
        model = self._model_of(model)
        with self._attached(model, dataloaders, datamodule, "predict") as data:
            loaders = data.loaders("predict_dataloader", dataloaders)
            self._prepare_for(model, ckpt_path)
            outputs: list[Any] = []
            self._evaluate("predict", loaders, outputs.append)
        return outputs if return_predictions else None

    def save_checkpoint(self, filepath: Any, weights_only: bool = False) -> None:  # noqa: ARG002 - always the weights
        """Write the weights and hyperparameters, as ``load_from_checkpoint`` of the module reads them.

        A run resumes from checkpoints of tp: ``Trainer(checkpoint="run")``.
        """
        state = {
            "state_dict": self.session.model_state(self._prepared or self.model),
            "hyper_parameters": dict(getattr(self.model, "hparams", {})),
            "epoch": self.current_epoch,
            "global_step": self.global_step,
            "pytorch-lightning_version": "2.0.0",  # which of its migrations a reader needs
        }
        if self.is_global_zero:
            with atomic_part(Path(filepath)) as part, part.open("wb") as file:
                torch.save(state, file)
        self.session.barrier()

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*args, **options)

    # -- preparing ------------------------------------------------------------------------------------

    @contextmanager
    def _attached(self, model: Any, loaders: Any, datamodule: Any, stage: _Stage) -> Iterator["_Data"]:
        """Set up the data, and answer the calls of the module within the block."""
        if datamodule is None and _is_datamodule(loaders):
            datamodule = loaders
        data = _Data(model, datamodule)
        self.model, self.datamodule = model, datamodule
        model.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        answers: dict[str, Any] = {
            "log": self._log_value,
            "log_dict": self._log_values,
            "optimizers": self._optimizers_of,
            "lr_schedulers": self._schedulers_of,
            "manual_backward": self._manual_backward,
            "clip_gradients": self._clip_gradients,
            "all_gather": self._all_gather,
            "print": self.print,
        }
        vars(model).update(answers)  # before the class's own, as its private parts are Lightning's
        try:
            for holder in (datamodule, model):
                if hasattr(holder, "prepare_data"):
                    if self.local_rank == 0:
                        holder.prepare_data()
                    if self.world_size > 1:
                        self.session.barrier()
                if hasattr(holder, "setup"):
                    holder.setup(stage)
            for callback in self.callbacks:
                if hasattr(callback, "setup"):
                    callback.setup(self, model, stage)
            _call(model, "configure_model")
            yield data
            for holder in (datamodule, model):
                _call(holder, "teardown", stage)
        finally:
            for name in answers:
                vars(model).pop(name, None)

    def _set_up(self, model: Any) -> None:
        """Make optimizers and schedulers, and prepare them with the module."""
        model.to(self._own.device)
        self.optimizers, self.lr_scheduler_configs = _configured(model.configure_optimizers())
        is_manual = not getattr(model, "automatic_optimization", True)
        if len(self.optimizers) != 1 and not is_manual:
            msg = (
                f"configure_optimizers() has returned {len(self.optimizers)} optimizers; automatic "
                "optimization takes one. Set self.automatic_optimization = False and step them yourself"
            )
            raise ConfigError(msg)
        if is_manual and self._precision == "fp16-mixed":
            msg = "precision='16-mixed' is not here with manual optimization; write precision='bf16-mixed'"
            raise ConfigError(msg)
        self._prepared = self._own.prepare(model, *self.optimizers)[0] if self.optimizers else None
        if self._prepared is None:
            self._prepared = self._own.prepare(model)
        if is_manual:
            if self.world_size > 1 and type(self.session).__name__ == "FsdpSession":
                msg = "manual optimization is not here with 'fsdp'; write trainer.loop, which takes it"
                raise ConfigError(msg)
            for optimizer in self.optimizers:
                self._count_steps(optimizer)

    def _count_steps(self, optimizer: Optimizer) -> None:
        """Count the steps of an optimizer that the module steps by itself."""

        def after(*_: Any) -> None:
            self.global_step += 1

        hook_steps(optimizer, after=after)

    def _model_of(self, model: Any) -> Any:
        if model is None and self.model is None:
            msg = "give the module: trainer.test(model), or fit() one before"
            raise ConfigError(msg)
        return self.model if model is None else model

    def _prepare_for(self, model: Any, ckpt_path: Any) -> None:
        """Prepare a module for an evaluation, with the weights of a checkpoint."""
        model.to(self._own.device)
        self._prepared = self._own.prepare(model)
        if ckpt_path is None:
            return
        path: Any = ckpt_path
        if path in ("best", "last"):
            checkpoint = self._checkpoint
            if checkpoint is None:
                msg = f"ckpt_path={path!r} needs a run's folder: Trainer(checkpoint='run')"
                raise ConfigError(msg)
            folder: Any = getattr(checkpoint, "folder", checkpoint)
            best = getattr(checkpoint, "best", None) if path == "best" else None
            path = find_checkpoint(folder, best=best, mode=getattr(checkpoint, "mode", "min"))
        self._own.load_model(model, path)

    # -- training -------------------------------------------------------------------------------------

    def _train(self, model: Any, train: Any, validation: Sequence[Any], ckpt_path: Any) -> None:
        own = self._own
        loader = own.prepare(train)
        val_loaders = [own.prepare(one, training=False) for one in validation]
        validates = bool(val_loaders) and hasattr(model, "validation_step")
        state: dict[str, Any] = {"model": self._prepared, "module": _ModuleState(self)}
        for i, optimizer in enumerate(self.optimizers):
            state["optimizer" if len(self.optimizers) == 1 else f"optimizer_{i}"] = optimizer
        for i, one in enumerate(self.lr_scheduler_configs):
            state[f"scheduler_{i}"] = one.scheduler
        limits = dict(self._limits)
        if self._batch_limits["fit"] is not None:
            limits["steps_per_epoch"] = _cut(len(loader), self._batch_limits["fit"])
        steps = limits.get("steps_per_epoch") or _length(loader)
        if validates and self.num_sanity_val_steps:
            self.sanity_checking = True
            self._evaluate("validate", val_loaders, most=self.num_sanity_val_steps)
            self.sanity_checking = False
            self.results.newest.clear()
        resume = None
        if ckpt_path is not None:
            resume = "auto" if ckpt_path == "last" else ckpt_path
        log = None
        if self._log:
            hyperparameters = dict(getattr(model, "hparams", {})) or None
            log = LogOptions(self._log, every_steps=self.log_every_n_steps, hyperparameters=hyperparameters)
        validating = self._validation(val_loaders, steps) if validates else None
        with own.loop(
            loader,
            limits=Limits(**limits),
            validation=validating,
            checkpoint=self._saved_after(validating),
            resume=resume,
            callbacks=[*self.own_callbacks, _Events(self)],
            log=log,
            state=state,
        ) as loop:
            self._loop = loop
            self.global_step = max(self.global_step, loop.step)
            self.training = True
            model.train()
            self._hook("on_fit_start")
            self._hook("on_train_start")
            for batches in loop.by_epoch():
                for index, batch in enumerate(batches, start=loop.batches_done):
                    self._train_batch(model, batch, index)
            self._hook("on_train_end")
            self._hook("on_fit_end")
            self.training = False
        self._name_checkpoints()

    def _name_checkpoints(self) -> None:
        """Note in Lightning's callback where the best and the newest checkpoint are."""
        theirs, ours = self.checkpoint_callback, self._checkpoint
        if theirs is None or not isinstance(ours, Checkpoints):
            return
        newest = find_checkpoint(ours.folder)
        theirs.last_model_path = theirs.best_model_path = str(newest)
        if ours.best is not None:
            with suppress(ConfigError):  # the metric was always NaN: no checkpoint is the best
                best = find_checkpoint(ours.folder, best=ours.best, mode=ours.mode)
                theirs.best_model_path = str(best)
                metrics = json.loads((best / "manifest.json").read_text(encoding="utf-8"))["metrics"]
                theirs.best_model_score = torch.tensor(metrics[ours.best])

    def _saved_after(self, validating: Validation | None) -> Any:
        """Return when to save: for Lightning's callback after each validation, those within epochs too."""
        checkpoint: Any = self._checkpoint
        every = None if validating is None else validating.every_steps
        is_lightnings = self.checkpoint_callback is not None and isinstance(checkpoint, Checkpoints)
        if every is None or not is_lightnings or checkpoint.every_epochs is None:
            return checkpoint
        if checkpoint.every_epochs > 1:
            msg = (
                f"ModelCheckpoint(every_n_epochs={checkpoint.every_epochs}) with validations within an epoch "
                "is not here; with tp, leave every_n_epochs out, to save after each validation"
            )
            raise ConfigError(msg)
        return replace(checkpoint, every_steps=every)

    def _validation(self, loaders: Sequence[PreparedLoader], steps: int | None) -> Validation:
        def validate() -> dict[str, float]:
            if (self.current_epoch + 1) % self._val_epochs:
                return {}
            found = self._evaluate("validate", loaders)
            if self._loop is not None:  # under their own names; those with "val_" get theirs from tp
                self._loop.log(**{n: v for n, v in found.items() if not n.startswith("val_")})
            return {n.removeprefix("val_"): float(v) for n, v in found.items() if n.startswith("val_")}

        every = self._val_interval
        if every is None or every == 1.0:
            return Validation(validate)
        if isinstance(every, float):
            if steps is None:
                msg = f"val_check_interval={every} needs a loader with a length; give a number of batches"
                raise ConfigError(msg)
            every = max(1, int(steps * every))
        return Validation(validate, every_steps=max(1, int(every) // self.accumulate_grad_batches))

    def _train_batch(self, model: Any, batch: Any, index: int) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101 - set before
        batch = _transferred(model, batch)
        self.results.begin("training_step", batch)
        if self._hook("on_train_batch_start", batch, index) == -1:
            msg = (
                "on_train_batch_start() has returned -1, to skip the rest of the epoch, which is not here; "
                "write Trainer(limit_train_batches=...), or set trainer.should_stop"
            )
            raise ConfigError(msg)
        is_automatic = getattr(model, "automatic_optimization", True)
        if is_automatic:
            is_last = index + 1 == loop.steps_per_epoch
            output = self._automatic(model, batch, index, loop)
            if loop.ends_step:
                self._step_schedulers("step", index + 1, plateau=False)
            if is_last:
                self._step_schedulers("epoch", self.current_epoch + 1, plateau=False)
        else:
            with self._own.autocast():
                output = _step_of(model, "training_step", batch, index)
        self._hook("on_train_batch_end", output, batch, index)
        if is_automatic and loop.ends_step:
            self._step_schedulers("step", index + 1, plateau=True)

    def _automatic(self, model: Any, batch: Any, index: int, loop: Loop) -> Any:
        own, optimizer = self._own, self.optimizers[0]
        accumulate = self.accumulate_grad_batches
        outputs: list[Any] = []

        def closure() -> Tensor:
            quiet: AbstractContextManager[None] = nullcontext() if loop.ends_step else own.no_sync(model)
            with quiet:
                output = own.run(lambda m, b: _step_of(m, "training_step", b, index), model, batch)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    msg = (
                        f"training_step() has returned {type(output).__name__}; return the loss, or a dict "
                        "with it under 'loss'. To leave out a batch, return a loss times 0"
                    )
                    raise StepError(msg)
                outputs.append(output)
                if index % accumulate == 0:
                    self._hook("on_before_zero_grad", optimizer)
                    if hasattr(model, "optimizer_zero_grad"):
                        model.optimizer_zero_grad(self.current_epoch, index, optimizer)
                    else:
                        optimizer.zero_grad()
                loss = loss / accumulate
                self._hook("on_before_backward", loss)
                own.backward(loss)
                self._hook("on_after_backward")
            return loss.detach()

        if not loop.ends_step:
            closure()
        elif isinstance(optimizer, LBFGS) or _overrides(model, "optimizer_step"):

            def whole() -> Tensor:
                loss = closure()
                self._hook("on_before_optimizer_step", optimizer)
                self._clip(model, optimizer)
                return loss

            if hasattr(model, "optimizer_step"):
                model.optimizer_step(self.current_epoch, index, optimizer, whole)
            else:
                optimizer.step(whole)  # type: ignore[arg-type]  # torch calls float() on it
            self.global_step += 1
        else:
            closure()
            self._hook("on_before_optimizer_step", optimizer)
            clip = self.gradient_clip_val
            if clip and not _overrides(model, "configure_gradient_clipping"):
                name = "clip_value" if self.gradient_clip_algorithm == "value" else "clip_norm"
                own.update(model, optimizer, **{name: clip})
            else:
                self._clip(model, optimizer)
                own.update(model, optimizer)
            self.global_step += 1
        return outputs[-1]

    def _clip(self, model: Any, optimizer: Optimizer) -> None:
        value, algorithm = self.gradient_clip_val, self.gradient_clip_algorithm
        if _overrides(model, "configure_gradient_clipping"):
            model.configure_gradient_clipping(
                optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
            )
        elif value:
            self._clip_gradients(optimizer, value, algorithm)

    def _step_schedulers(self, interval: str, done: int, *, plateau: bool) -> None:
        for one in self.lr_scheduler_configs:
            if one.interval != interval or done % one.frequency or one.on_plateau is not plateau:
                continue
            metric = None
            if plateau:
                if one.monitor not in self.results.newest:
                    if not one.strict:
                        continue
                    msg = (
                        f"a scheduler monitors {one.monitor!r}, which was not logged; logged were "
                        f"{', '.join(sorted(self.results.newest)) or 'no numbers'}"
                    )
                    raise ConfigError(msg)
                metric = self.results.newest[one.monitor]
            if hasattr(self.model, "lr_scheduler_step"):
                self.model.lr_scheduler_step(one.scheduler, metric)
            else:
                one.scheduler.step(*(() if metric is None else (metric,)))

    def end_epoch(self) -> None:
        """End an epoch: the module's hook, the means of it, schedulers that look at them."""
        self.results.begin("on_train_epoch_end", None)
        self._hook("on_train_epoch_end")
        self.results.finish("train", self.session)
        if getattr(self.model, "automatic_optimization", True):
            self._step_schedulers("epoch", self.current_epoch + 1, plateau=True)

    def begin_epoch(self) -> None:
        """Begin an epoch: the module's hook."""
        self.results.begin("on_train_epoch_start", None)
        self._hook("on_train_epoch_start")

    # -- evaluation -----------------------------------------------------------------------------------

    def _evaluate_alone(
        self, stage: _Stage, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        model = self._model_of(model)
        step = "validation_step" if stage == "validate" else "test_step"
        _check_module(model, (step,))
        with self._attached(model, dataloaders, datamodule, stage) as data:
            name = "val_dataloader" if stage == "validate" else "test_dataloader"
            loaders = data.loaders(name, dataloaders)
            self._prepare_for(model, ckpt_path)
            found = self._evaluate(stage, loaders)
        forked = self.results.forked
        found = {_forked(name, "epoch") if name in forked else name: v for name, v in found.items()}
        if verbose:
            for name, value in found.items():
                self.print(f"{name}  {float(value):.6g}")
        count = len(loaders)
        return [
            {
                n: float(v)
                for n, v in found.items()
                if f"/dataloader_idx_{i}" in n or "/dataloader_idx_" not in n
            }
            for i in range(count)
        ]

    def _evaluate(
        self,
        stage: _Stage,
        loaders: Sequence[Any],
        take: Callable[[Any], None] | None = None,
        most: int | None = None,
    ) -> dict[str, Tensor]:
        """Go through loaders with the module in evaluation mode; return what it logged."""
        model, own = self.model, self._own
        word = {"validate": "validation", "test": "test", "predict": "predict"}[stage]
        step = f"{word}_step"
        prepared = [
            one if isinstance(one, PreparedLoader) else own.prepare(one, training=False) for one in loaders
        ]
        modes = {module: module.training for module in model.modules()}
        was_training, self.training = self.training, False
        setattr(self, f"{word[:-3] if word == 'validation' else word}ing", True)
        model.eval()
        try:
            with torch.no_grad():
                self.session.sync_buffers(self._prepared)
                self.results.begin(f"on_{word}_start", None)
                self._hook(f"on_{word}_start")
                self.results.begin(f"on_{word}_epoch_start", None)
                self._hook(f"on_{word}_epoch_start")
                for number, loader in enumerate(prepared):
                    self.results.loader = number if len(prepared) > 1 else None
                    limit = _cut(_length(loader) or 0, self._batch_limits[stage]) if most is None else most
                    known = most is not None or self._batch_limits[stage] is not None
                    for index, yielded in enumerate(itertools.islice(loader, limit if known else None)):
                        batch = _transferred(model, yielded)
                        self.results.begin(step, batch)
                        self._hook(f"on_{word}_batch_start", batch, index, number)
                        output = own.run(
                            lambda m, b, i=index, n=number: _step_of(m, step, b, i, n), model, batch
                        )
                        self._hook(f"on_{word}_batch_end", output, batch, index, number)
                        if take is not None:
                            take(self._all_rows(output))
                self.results.loader = None
                self.results.begin(f"on_{word}_epoch_end", None)
                self._hook(f"on_{word}_epoch_end")
                found = self.results.finish(word, self.session)
                self._hook(f"on_{word}_end")
        finally:
            for module, mode in modes.items():
                module.training = mode
            self.training = was_training
            self.validating = self.testing = self.predicting = False
        return found

    def _all_rows(self, output: Any) -> Any:
        if self.session.data_size == 1:
            return output
        return tree_map(lambda v: self.session.gather(v) if isinstance(v, Tensor) and v.dim() else v, output)

    # -- calls of the module --------------------------------------------------------------------------

    def _hook(self, name: str, *args: Any) -> Any:
        """Call a hook of the callbacks and of the module, as far as they have it."""
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self, self.model, *args)
        return _call(self.model, name, *args)

    def _log_value(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,  # noqa: ARG002 - progress shows the loss
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,  # noqa: ARG002 - numbers have no graph
        sync_dist: bool = False,  # noqa: ARG002 - means are always those of all ranks
        sync_dist_group: Any = None,  # noqa: ARG002
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,  # noqa: ARG002
        rank_zero_only: bool = False,  # noqa: ARG002
    ) -> None:
        shown = self.results.add(
            name,
            value,
            on_step=on_step,
            on_epoch=on_epoch,
            reduction=getattr(reduce_fx, "__name__", reduce_fx),
            indexed=add_dataloader_idx,
            weight=batch_size,
        )
        if self._loop is not None and self.training and logger is not False and shown is not None:
            self._loop.log(**{name: shown})

    def _log_values(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self._log_value(name, value, *args, **options)

    def _optimizers_of(self, use_pl_optimizer: bool = True) -> Any:  # noqa: ARG002 - both are torch's
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    def _schedulers_of(self) -> Any:
        found = [one.scheduler for one in self.lr_scheduler_configs]
        return found[0] if len(found) == 1 else found or None

    def _manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        self._hook("on_before_backward", loss)
        self._own.backward(loss, *args, **options)
        if self.session.data_size > 1:
            # The module runs past DDP, which averages once for each of its own forwards. What was averaged
            # before is the same on all ranks, and stays as it is.
            for parameter in (p for optimizer in self.optimizers for p in _parameters(optimizer)):
                if parameter.grad is not None:
                    parameter.grad.copy_(self.session.reduce(parameter.grad, "mean"))
        self._hook("on_after_backward")

    def _clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        limit = self.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or self.gradient_clip_algorithm
        if not limit:
            return
        mine = _parameters(optimizer)
        if str(getattr(algorithm, "value", algorithm)) == "value":
            nn.utils.clip_grad_value_(mine, limit)
        elif self._prepared is not None and len(self.optimizers) == 1:
            self.session.clip_grad_norm(self._prepared, limit)
        else:
            nn.utils.clip_grad_norm_(mine, limit)

    def _all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:  # noqa: ARG002 - all ranks
        """Return tensors of all ranks in a new first dimension, (ranks, ...)."""
        if self.world_size == 1:
            return data

        def gathered(value: Any) -> Tensor:
            tensor = torch.as_tensor(value, device=self._own.device)[None]
            return self._own.all_gather(tensor) if sync_grads else self.session.gather(tensor)

        return tree_map(gathered, data)


# -- Values that a module logs --------------------------------------------------------------------


@dataclass(slots=True)
class _Value:
    """What was logged under a name in an epoch: a weighted sum, an extreme, or a metric object."""

    reduction: str
    total: float | Tensor = 0.0
    weight: float = 0.0
    metric: Any = None
    forked: bool = False
    on_epoch: bool = True


class _Results:
    """Collects what a module logs: values of steps, and of epochs over the samples of all ranks.

    Attributes:
        newest: The newest values, by all names that a callback may ask for.
        forked: Names of the last epoch that have values of steps, too.
    """

    def __init__(self) -> None:
        self.newest: dict[str, Tensor] = {}
        self.loader: int | None = None
        self.forked: set[str] = set()
        self._values: dict[tuple[str, str], _Value] = {}
        self._function, self._batch = "", None

    def begin(self, function: str, batch: Any) -> None:
        """Note the function of the module that runs now, and its batch."""
        self._function, self._batch = function, batch

    def add(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None,
        on_epoch: bool | None,
        reduction: str,
        indexed: bool,
        weight: float | None,
    ) -> Any:
        """Add a value; return it if loggers are to have it for this step."""
        if reduction not in ("mean", "sum", "min", "max", "avg"):
            msg = f"log(reduce_fx={reduction!r}) is not here: 'mean', 'sum', 'min', 'max', or a metric object"
            raise ConfigError(msg)
        is_step = self._function == "training_step" or self._function.startswith("on_train_batch")
        on_step = is_step if on_step is None else on_step
        on_epoch = not is_step if on_epoch is None else on_epoch
        stage = next((s for s in ("validation", "test", "predict") if s in self._function), "train")
        if indexed and self.loader is not None:
            name = f"{name}/dataloader_idx_{self.loader}"
        known = self._values.setdefault((stage, name), _Value(reduction))
        known.forked, known.on_epoch = on_step and on_epoch, on_epoch
        if hasattr(value, "compute") and hasattr(value, "update"):
            known.metric = value
            return None
        number = value.detach().float() if isinstance(value, Tensor) else torch.tensor(float(value))
        if isinstance(value, Tensor) and value.dtype is torch.float64:
            number = value.detach()
        if on_epoch:
            if reduction in ("min", "max"):
                pick = torch.minimum if reduction == "min" else torch.maximum
                known.total = number if not known.weight else pick(torch.as_tensor(known.total), number)
                known.weight = 1.0
            else:
                count = 1.0 if reduction == "sum" else weight
                if count is None:
                    count = float(count_samples(self._batch)) if self._batch is not None else 1.0
                known.total = known.total + number * count
                known.weight += count
        if on_step:
            self.newest[name] = number
            if known.forked:
                self.newest[_forked(name, "step")] = number
        return number if on_step or stage == "train" else None

    def finish(self, stage: str, session: Any) -> dict[str, Tensor]:
        """Return the values of an epoch, over all ranks, and forget them.

        Collective: one gather of objects.
        """
        mine = {n: v for (s, n), v in self._values.items() if s == stage}
        self.forked = {name for name, value in mine.items() if value.forked}
        for name in mine:
            del self._values[stage, name]
        sums = {n: (v.reduction, float(v.total), v.weight) for n, v in mine.items() if v.metric is None}
        everyone = session.gather_objects(sums)
        found: dict[str, Tensor] = {}
        for name, value in mine.items():
            if value.metric is not None:
                result = value.metric.compute()
                value.metric.reset()
                found[name] = torch.as_tensor(result)
            elif value.on_epoch:
                found[name] = torch.tensor(_joined([each[name] for each in everyone if name in each]))
            if name in found:
                self.newest[name] = found[name]
                if value.forked:
                    self.newest[_forked(name, "epoch")] = found[name]
        return {n: v for n, v in found.items() if v.numel() == 1}


def _forked(name: str, word: str) -> str:
    """Return the name of the steps' values, or of the epoch's, where a module logs both."""
    own, mark, loader = name.partition("/dataloader_idx_")
    return f"{own}_{word}{mark}{loader}"


def _joined(parts: Sequence[tuple[str, float, float]]) -> float:
    reduction = parts[0][0]
    if reduction in ("min", "max"):
        return (min if reduction == "min" else max)(total for _, total, _ in parts)
    total, weight = sum(p[1] for p in parts), sum(p[2] for p in parts)
    return total if reduction == "sum" else total / weight


# -- Parts of a run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A scheduler, and when it steps: the fields of Lightning's dict."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    on_plateau: bool = False
    name: str | None = None


def _configured(found: Any) -> tuple[list[Optimizer], list[_Schedule]]:
    """Return the optimizers and schedulers of what ``configure_optimizers`` returned, in any of its forms."""
    if isinstance(found, Optimizer):
        return [found], []
    if isinstance(found, Mapping) and "optimizer" in found:
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        return [found["optimizer"]], [_schedule(s, found.get("monitor")) for s in schedulers]
    if isinstance(found, list | tuple) and found:
        if all(isinstance(one, Optimizer) for one in found):
            return list(found), []
        if len(found) == 2 and all(isinstance(part, list | tuple) for part in found):
            return list(found[0]), [_schedule(one) for one in found[1]]
        if all(isinstance(one, Mapping) for one in found):
            pairs = [_configured(one) for one in found]
            return [o for os, _ in pairs for o in os], [s for _, ss in pairs for s in ss]
    msg = (
        f"configure_optimizers() has returned {type(found).__name__}; return an optimizer, a list of them, "
        "two lists, or a dict with 'optimizer' and 'lr_scheduler'"
    )
    raise ConfigError(msg)


def _schedule(given: Any, monitor: str | None = None) -> _Schedule:
    fields = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    plateau = fields.pop("reduce_on_plateau", isinstance(fields["scheduler"], ReduceLROnPlateau))
    fields.setdefault("monitor", monitor)
    unknown = fields.keys() - set(_Schedule.__slots__)
    if unknown:
        msg = f"the dict of a scheduler has {', '.join(sorted(unknown))}, and may have {_Schedule.__slots__}"
        raise ConfigError(msg)
    return _Schedule(**fields, on_plateau=plateau)


class _Events(Callback):
    """Passes the beginnings and ends of epochs to the module."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_epoch_start(self, run: RunView) -> None:  # noqa: ARG002
        self._trainer.begin_epoch()

    def on_epoch_end(self, run: RunView) -> None:  # noqa: ARG002
        self._trainer.end_epoch()


class _ModuleState:
    """What a module, its datamodule and callbacks keep in checkpoints beside weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        module: dict[str, Any] = {}
        _call(self._trainer.model, "on_save_checkpoint", module)
        data = _call(self._trainer.datamodule, "state_dict") or {}
        callbacks = [_call(one, "state_dict") or {} for one in self._trainer.callbacks]
        return {"module": module, "data": data, "callbacks": callbacks, "step": self._trainer.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _call(self._trainer.model, "on_load_checkpoint", dict(state["module"]))
        if state["data"]:
            _call(self._trainer.datamodule, "load_state_dict", state["data"])
        for one, found in zip(self._trainer.callbacks, state["callbacks"], strict=True):
            if found:
                one.load_state_dict(found)
        self._trainer.global_step = state["step"]


class _Data:
    """The loaders of a call: given, of a datamodule, or of the module."""

    def __init__(self, model: Any, datamodule: Any) -> None:
        self._holders = (datamodule, model)

    def loader(self, name: str, given: Any, *, optional: bool = False) -> Any:
        """Return what was given, or what ``name()`` of the datamodule or the module returns."""
        if given is not None and not _is_datamodule(given):
            return given
        for holder in self._holders:
            if holder is not None and _overrides(holder, name):
                return getattr(holder, name)()
        if optional:
            return None
        msg = f"there is no loader: give one, or a datamodule with {name}()"
        raise ConfigError(msg)

    def loaders(self, name: str, given: Any, *, optional: bool = False) -> list[Any]:
        found = self.loader(name, given, optional=optional)
        if isinstance(found, Mapping):
            return list(found.values())
        if isinstance(found, list | tuple):
            return list(found)
        return [] if found is None else [found]


class _LoggerView:
    """What ``self.logger`` is in a module: numbers go to the run's loggers."""

    name = version = None

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # noqa: ARG002 - the run's
        if self._trainer._loop is not None:
            self._trainer._loop.log(**{name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run logs the module's ``hparams``."""

    def __getattr__(self, name: str) -> Any:
        msg = (
            f"self.logger has no {name!r} here; give tp's own: logger=tp_trainer.loggers.TensorBoardLogger()"
        )
        raise AttributeError(msg)


# -- Modules --------------------------------------------------------------------------------------


def _call(holder: Any, name: str, *args: Any) -> Any:
    method = getattr(holder, name, None)
    return method(*args) if callable(method) else None


def _overrides(holder: Any, name: str) -> bool:
    """Return whether a module has a method that is not Lightning's own."""
    method = getattr(type(holder), name, None) or vars(holder).get(name)
    return callable(method) and not str(getattr(method, "__module__", "")).startswith(
        ("lightning.", "pytorch_lightning.")
    )


def _step_of(model: Any, name: str, *args: Any) -> Any:
    """Call a step with as many of (batch, batch_idx, dataloader_idx) as it takes."""
    method = getattr(model, name)
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return method(*args)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return method(*args[: len(positional)])


def _transferred(model: Any, batch: Any) -> Any:
    """Return the batch, which a prepared loader has moved, after the module's hooks around the move."""
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if _overrides(model, name):
            batch = getattr(model, name)(batch, 0)
    return batch


def _check_module(model: Any, names: Iterable[str]) -> None:
    """Refuse a module without a method, or with one that is not here."""
    if not isinstance(model, nn.Module):
        msg = f"the first argument is a LightningModule, got {type(model).__name__}"
        raise ConfigError(msg)
    for name in names:
        if not _overrides(model, name):
            msg = f"{type(model).__name__} has no {name}(), which this call runs; write it"
            raise ConfigError(msg)
    refused = {
        "backward": "self.automatic_optimization = False, and self.manual_backward(loss)",
        "configure_callbacks": "Trainer(callbacks=[...])",
        "configure_sharded_model": "configure_model(), with strategy='fsdp'",
        "transfer_batch_to_device": "a batch of dicts, lists, tuples or dataclasses, which is moved",
    }
    for name, instead in refused.items():
        if _overrides(model, name):
            msg = f"{type(model).__name__}.{name}() is not called here; write {instead}"
            raise ConfigError(msg)


def _is_datamodule(value: Any) -> bool:
    return hasattr(value, "train_dataloader") or hasattr(value, "test_dataloader")


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, ValueError):  # a stream
        return None


def _cut(length: int, limit: float | None) -> int:
    """Return a number of batches: all, a number of them, or a fraction."""
    if limit is None:
        return length
    return int(length * limit) if isinstance(limit, float) else min(length, limit) if length else limit


# -- Arguments of Lightning's trainer -------------------------------------------------------------


def _refuse_arguments(others: Mapping[str, Any]) -> None:
    known = [p for p in inspect.signature(Trainer).parameters if p != "others"]
    for name, value in others.items():
        if name in _WITHOUT_EFFECT or (name in _ELSEWHERE and value in (None, False)):
            continue
        theirs = _ELSEWHERE.get(name)
        hint = those_known(name, known) if theirs is None else f"; with tp, write {theirs}"
        msg = f"this Trainer has no argument {name!r}{hint}"
        raise ConfigError(msg)


def _sort_callbacks(given: Any) -> tuple[list[Any], list[Callback], Any]:
    """Return callbacks with Lightning's hooks, tp's own, and a ``ModelCheckpoint``, of what was given."""
    theirs: list[Any] = []
    ours: list[Callback] = []
    checkpoints = None
    for one in given if isinstance(given, list | tuple) else [given] if given is not None else []:
        kind = type(one)
        if isinstance(one, Callback):
            ours.append(one)
        elif not kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
            theirs.append(one)
        elif kind.__name__ == "EarlyStopping":
            ours.append(_early_stopping(one))
        elif kind.__name__ == "LearningRateMonitor":
            _refuse_options(one)
            ours.append(LearningRateMonitor())
        elif kind.__name__ == "ModelCheckpoint":
            if checkpoints is not None:
                msg = (
                    "a run has one ModelCheckpoint here; to save at several times, write "
                    "Trainer(checkpoint=Checkpoints('run', every_steps=..., every_epochs=...))"
                )
                raise ConfigError(msg)
            _refuse_options(one)
            checkpoints = one
        elif not kind.__name__.endswith(_NOT_NEEDED):
            known = {"Timer": "Trainer(max_time=...)", "Callback": "a class of your own"}
            instead = known.get(kind.__name__, "one of tp_trainer.callbacks")
            msg = f"Lightning's callback {kind.__name__} is not here; with tp, write {instead}"
            raise ConfigError(msg)
    return theirs, ours, checkpoints


def _refuse_options(theirs: Any) -> None:
    """Refuse the options of a callback of Lightning that are not here."""
    kind = type(theirs).__name__
    for field, (here, instead) in _CALLBACK_OPTIONS[kind].items():
        value = getattr(theirs, field, here[0])  # versions of Lightning differ in what they have
        if value not in here:
            name = field.removeprefix("_")
            msg = f"{kind}({name}={value!r}) is not here; with tp, {instead}"
            raise ConfigError(msg)


def _early_stopping(theirs: Any) -> EarlyStopping:
    _refuse_options(theirs)
    at_epochs = not theirs.monitor.startswith("val_")
    if theirs._check_on_train_epoch_end not in (None, at_epochs):
        msg = (
            f"EarlyStopping(check_on_train_epoch_end={not at_epochs}) is not here; with tp, leave it out: "
            f"{theirs.monitor!r} is checked after each {'epoch' if at_epochs else 'validation'}"
        )
        raise ConfigError(msg)
    return EarlyStopping(
        theirs.monitor,
        patience=theirs.patience,
        mode=theirs.mode,
        min_delta=abs(theirs.min_delta),  # there its sign depends on the mode
        check_finite=theirs.check_finite,
    )


def _checkpoints(theirs: Any) -> Checkpoints | None:
    if theirs.save_top_k == 0 and not theirs.save_last:
        return None
    interval = theirs._train_time_interval  # Lightning has the times in private fields alone; 0 is never
    return Checkpoints(
        theirs.dirpath or "checkpoints",
        every_steps=theirs._every_n_train_steps or None,
        every_s=interval and interval.total_seconds(),
        every_epochs=theirs._every_n_epochs or None,
        keep=sys.maxsize if theirs.save_top_k == -1 else 1,
        best=theirs.monitor if theirs.save_top_k else None,
        mode=theirs.mode,
    )


def _loggers(given: Any) -> list[Any]:
    found: list[Any] = []
    for one in given if isinstance(given, list | tuple) else [given]:
        kind = type(one).__name__
        if one is None or isinstance(one, bool):
            continue
        if kind == "CSVLogger":
            found.append(own_loggers.CsvLogger(one.log_dir))
        elif kind == "TensorBoardLogger" and not hasattr(one, "load_state_dict"):
            found.append(own_loggers.TensorBoardLogger(one.log_dir))
        elif kind == "WandbLogger" and not hasattr(one, "load_state_dict"):
            found.append("wandb")
        else:
            found.append(one)
    return found


def _check_devices(devices: Any, environment: LaunchEnvironment) -> None:
    """Refuse a number of devices that no launcher started."""
    wanted = len(devices) if isinstance(devices, list | tuple) else devices
    if isinstance(wanted, str):
        wanted = int(wanted) if wanted.isdigit() else -1
    here = environment.local_world_size
    if wanted not in (-1, None, here):
        how = f"start it with: tp launch -n {wanted} script.py (pip install tp-launch)"
        msg = f"devices={devices!r}, and a launcher started {here} process(es) on this host; {how}"
        raise ConfigError(msg)


def _devices(accelerator: str, environment: LaunchEnvironment) -> Any:
    if accelerator not in ("auto", "cpu", "gpu", "cuda", "mps"):
        msg = f"accelerator={accelerator!r} is not here: 'auto', 'cpu', 'gpu', 'cuda' and 'mps' are"
        raise ConfigError(msg)
    if accelerator == "cpu":
        return "cpu"
    return "auto" if environment.is_distributed else available_devices()[0]


def _backend_name(strategy: Any, backend: str | None, environment: LaunchEnvironment) -> str:
    if backend is not None:
        return backend
    if strategy not in _STRATEGIES:
        msg = f"strategy={strategy!r} is not here: {', '.join(_STRATEGIES)} are, or write backend='shard'"
        raise ConfigError(msg)
    return _STRATEGIES[strategy] if environment.is_distributed else "single"


def _precision(given: Any) -> Any:
    text = "32" if given is None else str(given)
    if text not in _PRECISIONS:
        msg = f"precision={given!r} is not here: {', '.join(_PRECISIONS)} are"
        raise ConfigError(msg)
    return _PRECISIONS[text]


def _time_of(given: Any) -> Any:
    """Return a time in seconds, or as text of tp: Lightning's text is "days:hours:minutes:seconds"."""
    if given is None or isinstance(given, int | float):
        return given
    if hasattr(given, "total_seconds"):
        return given.total_seconds()
    if isinstance(given, str) and given.count(":") == 3:
        days, hours, minutes, seconds = map(int, given.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return given


def _next_version(root: Any) -> Path:
    """Return the first folder "version_N" that does not exist."""
    folder = Path(root)
    return next(path for i in itertools.count() if not (path := folder / f"version_{i}").exists())
