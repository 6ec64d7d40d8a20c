"""Lightning's ``Trainer`` on tp's: it trains the ``LightningModule`` of a program as it is."""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from tp_core import LaunchEnvironment
from tp_core.arguments import explain_arguments, explain_init
from tp_core.errors import ConfigError
from tp_core.files import atomic_part
from tp_core.fully_sharded import FullyShardedSession
from tp_core.state import hook_steps
from tp_trainer import Trainer as OwnTrainer

from tp_lightning._arguments import (
    BatchArguments,
    GradientArguments,
    HardwareArguments,
    LengthArguments,
    LoggingArguments,
    Stage,
    ValidationArguments,
    refuse_arguments,
)
from tp_lightning._callbacks import sort_callbacks
from tp_lightning._checkpoints import SavingArguments
from tp_lightning._evaluation import evaluate
from tp_lightning._loggers import LoggerView, loggers_of
from tp_lightning._module import ModuleData, call, check_module, is_datamodule, overrides
from tp_lightning._module_calls import ModuleCalls
from tp_lightning._optimizers import LearningRateSchedule, configured
from tp_lightning._results import forked_name
from tp_lightning._run import ModuleRun
from tp_lightning._training import ModuleTraining


@explain_init
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

    Example:
        >>> class Line(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(1, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> trainer = Trainer(max_epochs=2, enable_checkpointing=False, enable_progress_bar=False)
        >>> trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2))
        >>> trainer.global_step
        4
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
        refuse_arguments(others, [p for p in inspect.signature(Trainer).parameters if p != "others"])
        environment = LaunchEnvironment.read()
        theirs, self._own_callbacks, model_checkpoint = sort_callbacks(callbacks)
        self._saving = SavingArguments.parse(
            checkpoint, model_checkpoint, default_root_dir, enable_checkpointing
        )
        hardware = HardwareArguments(
            accelerator, strategy, devices, precision, backend, options, sync_batchnorm, environment
        )
        self._length = LengthArguments.parse(max_epochs, max_steps, max_time, overfit_batches)
        self._times = ValidationArguments(
            val_check_interval, check_val_every_n_epoch or 1, num_sanity_val_steps or 0
        )
        self._logging = LoggingArguments(loggers_of(logger), log_every_n_steps or 50)
        clip_algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        self._own_precision = hardware.tp_precision
        self._own = OwnTrainer(
            backend=hardware.tp_backend,
            devices=hardware.tp_devices,
            precision=self._own_precision,
            accumulate=accumulate_grad_batches,
            options=hardware.tp_options,
            seed=seed,
            progress=False if enable_progress_bar is False else "auto",
        )
        self._run = ModuleRun(
            self,
            self._own,
            theirs,
            BatchArguments(limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches),
            GradientArguments(accumulate_grad_batches, gradient_clip_val, clip_algorithm),
        )
        self._calls = ModuleCalls(self._run)
        # As they were given, for modules that look at them.
        self.max_epochs = 1000 if max_epochs is None and max_steps == -1 else max_epochs
        self.max_steps = max_steps
        self.default_root_dir = default_root_dir
        self.barebones = False
        self.fast_dev_run = False
        self.train_dataloader: Any = None

    # -- what a module reads --------------------------------------------------------------------------

    @property
    def session(self) -> Any:
        """The session of tp."""
        return self._own.session

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0."""
        return self._run.current_epoch

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest values of all that was logged."""
        return self._run.results.newest

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
    def logger(self) -> LoggerView:
        """What ``self.logger`` of a module logs numbers with."""
        return LoggerView(self._log_metrics)

    @property
    def loggers(self) -> list[Any]:
        """Return no loggers, as tp's take numbers alone."""
        return []

    @property
    def num_training_batches(self) -> float:
        """The number of batches of an epoch."""
        if self._run.loop is not None:
            return self._run.loop.steps_per_epoch
        try:
            length = len(self.train_dataloader)
        except TypeError:
            return math.inf
        return self._run.batches.cut("fit", length)

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps of the run."""
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        if self._length.epochs is None:
            epochs = math.inf
        else:
            epochs = self._length.epochs
        if self._length.steps is None:
            most = math.inf
        else:
            most = self._length.steps
        return min(steps * epochs, most)

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this step; a module or callback may set it."""
        return self._run.loop is not None and self._run.loop.ending is not None

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop and self._run.loop is not None:
            self._run.loop.stop("should_stop was set")

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks with Lightning's hooks."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Any]) -> None:
        self._run.callbacks = callbacks

    @property
    def checkpoint_callback(self) -> Any:
        """Lightning's ``ModelCheckpoint``, if one was given."""
        return self._saving.callback

    @property
    def model(self) -> Any:
        """The module of the newest call."""
        return self._run.model

    @property
    def datamodule(self) -> Any:
        """The datamodule of the newest call."""
        return self._run.datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the module."""
        return self._run.optimizers

    @property
    def lr_scheduler_configs(self) -> list[LearningRateSchedule]:
        """The schedulers, and when they step."""
        return self._run.schedules

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far."""
        return self._run.global_step

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches in an optimizer step."""
        return self._run.gradients.accumulate

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest norm of the gradients, or element of them."""
        return self._run.gradients.clip

    @gradient_clip_val.setter
    def gradient_clip_val(self, limit: float | None) -> None:
        self._run.gradients = replace(self._run.gradients, clip=limit)

    @property
    def gradient_clip_algorithm(self) -> str:
        """How gradients are clipped, by "norm" or by "value"; "None" if they are not."""
        return self._run.gradients.algorithm

    @gradient_clip_algorithm.setter
    def gradient_clip_algorithm(self, algorithm: str) -> None:
        self._run.gradients = replace(self._run.gradients, algorithm=algorithm)

    @property
    def log_every_n_steps(self) -> int:
        """How often loggers get numbers."""
        return self._logging.every_steps

    @property
    def num_sanity_val_steps(self) -> int:
        """How many batches are validated before training."""
        return self._times.sanity_batches

    @property
    def training(self) -> bool:
        """Whether the module trains now."""
        return self._run.training

    @property
    def validating(self) -> bool:
        """Whether it is validated now."""
        return self._run.validating

    @property
    def testing(self) -> bool:
        """Whether it is tested now."""
        return self._run.testing

    @property
    def predicting(self) -> bool:
        """Whether it predicts now."""
        return self._run.predicting

    @property
    def sanity_checking(self) -> bool:
        """Whether it is validated before training."""
        return self._run.sanity_checking

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
        check_module(model, ("training_step", "configure_optimizers"))
        if val_dataloaders is not None and not overrides(model, "validation_step"):
            kind = type(model).__name__
            warnings.warn(
                f"a loader to validate with is given, and {kind} has no validation_step(): nothing is "
                "validated; write it, or leave the loader out",
                stacklevel=2,
            )
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
            training = ModuleTraining(
                self._run,
                self._calls,
                length=self._length,
                times=self._times,
                logging=self._logging,
                saving=self._saving,
            )
            training.fit(train, validation, callbacks=self._own_callbacks, ckpt_path=ckpt_path)

    @explain_arguments("validate(model, loader)")
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

    @explain_arguments("test(model, loader)")
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

    @explain_arguments("predict(model, loader)")
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
            evaluate(self._run, "predict", loaders, outputs.append)
        if return_predictions:
            return outputs
        return None

    @explain_arguments("save_checkpoint(path)")
    def save_checkpoint(self, filepath: Any, weights_only: bool = False) -> None:  # noqa: ARG002 - always the weights
        """Write the weights and hyperparameters, as ``load_from_checkpoint`` of the module reads them.

        A run resumes from checkpoints of tp: ``Trainer(checkpoint="run")``.
        """
        state = {
            "state_dict": self.session.model_state(self._run.prepared or self.model),
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

    def _evaluate_alone(
        self, stage: Stage, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        model = self._model_of(model)
        if stage == "validate":
            step = "validation_step"
        else:
            step = "test_step"
        check_module(model, (step,))
        with self._attached(model, dataloaders, datamodule, stage) as data:
            if stage == "validate":
                name = "val_dataloader"
            else:
                name = "test_dataloader"
            loaders = data.loaders(name, dataloaders)
            self._prepare_for(model, ckpt_path)
            logged = evaluate(self._run, stage, loaders)
        forked = self._run.results.forked
        logged = {forked_name(name, "epoch") if name in forked else name: v for name, v in logged.items()}
        if verbose:
            for name, value in logged.items():
                self.print(f"{name}  {float(value):.6g}")
        count = len(loaders)
        return [
            {
                n: float(v)
                for n, v in logged.items()
                if f"/dataloader_idx_{i}" in n or "/dataloader_idx_" not in n
            }
            for i in range(count)
        ]

    # -- preparing ------------------------------------------------------------------------------------

    @contextmanager
    def _attached(self, model: Any, loaders: Any, datamodule: Any, stage: Stage) -> Iterator[ModuleData]:
        """Set up the data, and answer the calls of the module within the block."""
        if datamodule is None and is_datamodule(loaders):
            datamodule = loaders
        data = ModuleData(model, datamodule)
        self._run.model = model
        self._run.datamodule = datamodule
        model.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        with self._calls.answered(model, print=self.print):
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
            call(model, "configure_model")
            yield data
            for holder in (datamodule, model):
                call(holder, "teardown", stage)

    def _set_up(self, model: Any) -> None:
        """Make optimizers and schedulers, and prepare them with the module."""
        run = self._run
        model.to(self._own.device)
        run.optimizers, run.schedules = configured(model.configure_optimizers())
        is_manual = not run.is_automatic
        if len(run.optimizers) != 1 and not is_manual:
            msg = (
                f"configure_optimizers() has returned {len(run.optimizers)} optimizers; automatic "
                "optimization takes one. Set self.automatic_optimization = False and step them yourself"
            )
            raise ConfigError(msg)
        if is_manual and self._own_precision == "fp16-mixed":
            msg = "precision='16-mixed' is not here with manual optimization; write precision='bf16-mixed'"
            raise ConfigError(msg)
        if run.optimizers:
            run.prepared = self._own.prepare(model, *run.optimizers)[0]
        else:
            run.prepared = self._own.prepare(model)
        if is_manual:
            if self.world_size > 1 and isinstance(self.session, FullyShardedSession):
                msg = "manual optimization is not here with 'fsdp'; write trainer.loop, which takes it"
                raise ConfigError(msg)
            for optimizer in run.optimizers:
                self._count_steps(optimizer)

    def _count_steps(self, optimizer: Optimizer) -> None:
        """Count the steps of an optimizer that the module steps by itself."""

        def after(*_: Any) -> None:
            self._run.global_step += 1

        hook_steps(optimizer, after=after)

    def _model_of(self, model: Any) -> Any:
        if model is None and self.model is None:
            msg = "give the module: trainer.test(model), or fit() one before"
            raise ConfigError(msg)
        if model is None:
            return self.model
        return model

    def _prepare_for(self, model: Any, ckpt_path: Any) -> None:
        """Prepare a module for an evaluation, with the weights of a checkpoint."""
        model.to(self._own.device)
        self._run.prepared = self._own.prepare(model)
        if ckpt_path is not None:
            self._own.load_model(model, self._saving.find(ckpt_path))

    def _log_metrics(self, metrics: Mapping[str, Any]) -> None:
        if self._run.loop is not None:
            self._run.loop.log(**{name: float(value) for name, value in metrics.items()})
