"""The trainer: one script for one device, many devices or many machines."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core import DeviceSpec, LaunchEnvironment, device_of_rank, resolve_devices
from tp_core.arguments import explain_arguments
from tp_core.data import LossReduction, StepOutput, read_weight
from tp_core.discovery import PluginRegistry, Selection
from tp_core.errors import ConfigError, StepError
from tp_core.jobs import CompileOptions, Precision
from tp_core.output import Progress, get_logger, shows_progress
from tp_core.plugins import Job, Session, registry
from tp_core.random import seed_everything
from tp_core.tensors import is_dtensor

from tp_trainer._checkpoint import Checkpoints
from tp_trainer._checks import (
    as_checkpoints,
    check_gradients,
    check_known,
    check_limit,
    check_loader,
    check_model,
    check_not_shared,
    check_optimizer,
    check_owner,
    check_positive,
    check_preparable,
    check_schedule,
    recognize_fit,
    recognize_prepare,
)
from tp_trainer._opening._session import LazySession, Options, check_name, options_by_backend
from tp_trainer._opening._uncaught import with_brief_errors
from tp_trainer._peer_names import ARGUMENTS, ATTRIBUTES, BY_VALUE, LOOP_ARGUMENTS
from tp_trainer._preparation import Preparation
from tp_trainer._steps._mistakes import explain_mistake
from tp_trainer._steps._step import (
    NO_GRADIENTS,
    RunStep,
    Step,
    autocast,
    guard_stop_iteration,
    in_precision,
    is_inherited,
    loss_of,
    parameters_of,
    warn_evaluation_mode,
    warn_no_gradients,
)
from tp_trainer._steps._step_state import StepStateWatch

if TYPE_CHECKING:
    from tp_core.plugins import Callback

    from tp_trainer._evaluation import Evaluation
    from tp_trainer._files import ModelFiles
    from tp_trainer._memory import MemoryTable
    from tp_trainer._metrics import Metric, Predictions
    from tp_trainer._running._context import RunContexts
    from tp_trainer._running._history import History
    from tp_trainer._running._loop import Loop
    from tp_trainer._running._settings import (
        Limits,
        LogOptions,
        LoopSettings,
        Scheduler,
        SchedulerOptions,
        Validation,
    )
    from tp_trainer._steps._optimizer_step import GradientRules
    from tp_trainer._verify import Verification
    from tp_trainer.loggers._named import LogSpec


log = get_logger("tp_trainer")

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
Output = TypeVar("Output", bound=StepOutput)
"""What a step returns: `trainer.run` returns the same type."""

_RUN = "run() takes a step, the models that it gets, and last the batch: run(step, model, batch)"

# Runs and files import their modules in the methods: a program may make a trainer without training.


class Trainer:
    """Runs one training script on the best installed backend, and explains the choice.

    The backend is chosen when :meth:`fit` or :meth:`prepare` gets the first model; nothing starts before.
    ``rank``, ``device`` and the like are known earlier. A trainer is a context manager; leaving it closes
    the session.

    Args:
        backend: The name of the backend, or "auto" for the best that fits. With "auto" the variable
            ``TP_BACKEND`` takes precedence. "fastest" has :meth:`fit` time six steps of up to three
            backends on copies of model and optimizer, which leave no trace, and keep the fastest: those that
            fit by memory, and that "auto" would choose first.
        devices: The devices, as for :func:`tp_core.resolve_devices`. Under a launcher they are the
            devices of one host, one for each of its processes.
        seed: Seeds Python, numpy (if it is loaded) and torch now, and orders the data. ``None``
            leaves the generators alone; rank 0 then chooses the order of the data.
        loss: Whether a step's loss is the "mean" over its samples, or their "sum".
        precision: "fp32"; "bf16-mixed" or "fp16-mixed", where a step runs under autocast and fp16
            scales the loss; or "bf16-true", where the model and the batches are in bfloat16.
        accumulate: How many batches :meth:`fit` puts into one optimizer step. Gradients are weighted by
            samples, or by the step's "weight", as if the batches were one.
        compile: Whether to compile models, in place. "blocks" compiles the blocks that repeat, each class of
            them once, which takes less time than the whole; `CompileOptions` takes torch's options, too.
        activation_checkpointing: With "auto" the backward pass computes again what must be, by the estimated
            memory, and no more: nothing, all but matrix products and attention, every second block, or every
            block. ``None`` leaves it to `checkpoint_activations` and to the backend.
        options: Options of backends, used if that one is chosen: ``DdpOptions(static_graph=True)``, a list
            of such objects, or a dict by backends' names, ``{"ddp": {"static_graph": True}}``.
        progress: Whether rank 0 shows progress. "auto" shows a bar on a terminal, and elsewhere a line per
            epoch. ``True`` adds lines within epochs; ``False`` shows nothing.
        plugins: The registry to choose from; by default the process-wide registry.

    Raises:
        DeviceError: The devices do not exist.
        LaunchEnvironmentError: The launcher's variables are incomplete.
        ConfigError: An argument has a wrong value.
        SelectionError: No backend of that name is installed.
        PluginError: The plugin of the backend is broken or blocked.

    Source: for "fp16-mixed" Micikevicius et al., "Mixed Precision Training", 2018, section 3.

    Example:
        >>> trainer = Trainer(seed=0)
        >>> trainer.fit(model, optimizer, loader, step=step, epochs=3)  # doctest: +SKIP
    """

    @with_brief_errors
    @explain_arguments(
        "Trainer(seed=0), and then trainer.fit(model, optimizer, loader, step=step)",
        instead=ARGUMENTS,
        by_value=BY_VALUE,
    )
    def __init__(
        self,
        *,
        backend: str = "auto",
        devices: DeviceSpec = "auto",
        seed: int | None = None,
        loss: LossReduction = "mean",
        precision: Precision = "fp32",
        accumulate: int = 1,
        compile: "bool | Literal['blocks'] | CompileOptions" = False,
        activation_checkpointing: Literal["auto"] | None = None,
        options: Options | None = None,
        progress: Progress = "auto",
        plugins: PluginRegistry = registry,
    ) -> None:
        if isinstance(seed, Integral) and not isinstance(seed, bool):
            seed = int(seed)  # of numpy, too
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            msg = f"seed must be None or a whole number from 0, got {seed!r}"
            raise ConfigError(msg)
        if not isinstance(backend, str):
            msg = (
                "backend must be the name of a backend, or 'auto' for the best one that fits, got "
                f"{backend!r}; leave it out for 'auto'"
            )
            raise ConfigError(msg)
        if activation_checkpointing not in (None, "auto"):
            msg = (
                f"activation_checkpointing must be None or 'auto', got {activation_checkpointing!r}; "
                "checkpoint_activations(model, ...) takes the classes, and what they keep"
            )
            raise ConfigError(msg)
        make_trial: Callable[..., Trainer] | None = None
        if backend == "fastest":
            backend = "auto"
            make_trial = partial(
                Trainer,
                devices=devices,
                loss=loss,
                precision=precision,
                accumulate=accumulate,
                compile=compile,
                activation_checkpointing=activation_checkpointing,
                options=options,
                progress=False,
                plugins=plugins,
            )
        check_name(plugins, backend)
        self.environment = LaunchEnvironment.read()
        if not isinstance(progress, bool):
            shows_progress(progress)  # which checks it
        self.progress = progress
        if devices in (None, "auto") and (named := os.environ.get("TP_DEVICES")):
            devices = named.split(",")
        explicit = devices not in (None, "auto")
        self._devices = resolve_devices(devices)
        if self.environment.is_distributed:  # under a launcher, one device of the host
            self._devices = (device_of_rank(self._devices, self.environment, explicit=explicit),)
        compile_options = _compile_options(compile)
        recomputation: Literal["nothing"] | None = None if activation_checkpointing is None else "nothing"
        job = Job(
            devices=self._devices,
            environment=self.environment,
            explicit_devices=explicit,
            loss=loss,
            precision=precision,
            accumulate=accumulate,
            compile=compile_options,
            options=options_by_backend(options, plugins),
            recomputation=recomputation,
        )
        self._preparation = Preparation(
            LazySession(job, plugins, backend, seed=seed),
            seed=seed,
            precision=precision,
            compile_options=compile_options,
            make_trial=make_trial,
        )
        # Of a custom loop: what runs its steps, whether it has run a backward pass, and whether the next one
        # reduces gradients over ranks.
        self._run_step: RunStep | None = None
        self._step_state: StepStateWatch | None = None
        self._has_run_backward = False
        self._reduces = True
        if seed is not None:
            seed_everything(seed)

    @cached_property
    def _contexts(self) -> "RunContexts":
        from tp_trainer._running._context import RunContexts

        return RunContexts()

    @cached_property
    def _evaluation(self) -> "Evaluation":
        from tp_trainer._evaluation import Evaluation

        return Evaluation(self._preparation, self._contexts)

    @cached_property
    def _files(self) -> "ModelFiles":
        from tp_trainer._files import ModelFiles

        return ModelFiles(self._preparation)

    @property
    def selection(self) -> Selection:
        """The chosen backend, and the reasons for and against each one; print it to see a table.

        Before the first model it is the choice for an unspecified model.
        """
        return self._preparation.selection

    @property
    def session(self) -> Session:
        """The running session; the first access starts the job.

        Raises:
            SelectionError: No backend fits.
        """
        return self._preparation.session

    # Read from the environment before the session is open: an access must not choose a backend yet.

    @property
    def device(self) -> torch.device:
        """The device of this process; the first one of several."""
        session = self._preparation.current
        if session is None:
            return self._devices[0]
        return session.device

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        session = self._preparation.current
        if session is None:
            return self.environment.rank
        return session.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host, from 0."""
        session = self._preparation.current
        if session is None:
            return self.environment.local_rank
        return session.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        session = self._preparation.current
        if session is None:
            return self.environment.world_size
        return session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes files and prints."""
        session = self._preparation.current
        if session is None:
            return self.environment.is_main
        return session.is_main

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            if name not in ATTRIBUTES:
                return object.__getattribute__(self, name)  # raises the error that led here
            msg = f"a Trainer has no {name!r}; write {ATTRIBUTES[name]}"
            raise AttributeError(msg, name=name, obj=self)

        def __setattr__(self, name: str, value: object) -> None:
            if name in _SETTINGS:
                msg = f"a Trainer's {name} is chosen when it is made; write Trainer({name}={value!r})"
                raise AttributeError(msg, name=name, obj=self)
            object.__setattr__(self, name, value)

    def close(self) -> None:
        """Close the session and the streams of loaders; calling it again does nothing."""
        self._preparation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- prepared objects -----------------------------------------------------------------------

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

    @explain_arguments("prepare(model, optimizer, loader)", recognize=recognize_prepare)
    def prepare(self, *objects: Any, shard: bool = True, training: bool = True) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the backend.

        Args:
            *objects: The objects, in any order.
            shard: Whether to split loaders over the data ranks; ``False`` for loaders that give each rank
                its own samples already.
            training: Whether the loaders are for training: every rank then makes the same number of steps,
                with a stand-in sample if it has none of a batch. With ``False`` each sample is on one rank,
                once, and no loss is weighted by it.

        Returns:
            The prepared objects in the same order; a single object alone.

        Raises:
            ModelError: A model is wrapped already.
            LoaderError: A loader cannot be split over the ranks.
            ConfigError: There is no object, or one is none of these; or an optimizer has another model's
                parameters.
            SelectionError: No backend fits, or the running session's backend does not fit a model.
            DisagreementError: Settings of an optimizer differ by rank.

        Collectives: the backend's for a model; and as in `Session.gather_objects`, if there is a model.

        Example:
            >>> model, optimizer, loader = trainer.prepare(model, optimizer, loader)
            ... for batch in loader:
            ...     optimizer.zero_grad()
            ...     trainer.backward(trainer.run(step, model, batch))
            ...     optimizer.step()  # doctest: +SKIP
        """
        from tp_trainer._memory import StepParts

        if not objects:
            msg = (
                "prepare() takes models, optimizers, loaders and schedulers, got nothing; write model, "
                "optimizer, loader = trainer.prepare(model, optimizer, loader)"
            )
            raise ConfigError(msg)
        for value in objects:
            check_preparable(value)
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer)]
        if len(optimizers) == 1 and len(models) == 1:
            optimizer = optimizers[0]
        else:
            optimizer = None
        work = StepParts(optimizer)
        session = self._preparation.open(*models, by="prepare()", work=work)
        if session.data_size > 1:
            check_not_shared(models)
        for optimizer in objects:
            if isinstance(optimizer, Optimizer) and models:
                check_owner(optimizer, models)
        # Models first: a backend may replace a model's parameters, and the optimizer must get the new ones.
        in_order = sorted(range(len(objects)), key=lambda i: not isinstance(objects[i], nn.Module))
        done = {i: self._prepare(objects[i], shard=shard, training=training) for i in in_order}
        prepared = tuple(done[i] for i in range(len(objects)))
        if models and session.world_size > 1:
            from tp_trainer._opening._agreement import check_same_optimizers

            # With each model, which all ranks prepare. Whether an optimizer lives is a rank's own matter: one
            # may have collected it, or prepare it by itself.
            check_same_optimizers(session, self._preparation.optimizers(), beside=None)
        if len(prepared) == 1:
            return prepared[0]
        return prepared

    def _prepare(self, value: Any, *, shard: bool, training: bool) -> Any:
        if isinstance(value, nn.Module):
            return self._preparation.prepare_model(value)
        if isinstance(value, Optimizer):
            return self._preparation.prepare_optimizer(value)
        if isinstance(value, LRScheduler | ReduceLROnPlateau):
            return value
        return self._preparation.prepare_loader(value, shard=shard, training=training, watched=True)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the prepared model that ``make`` builds, without the whole model on a rank if it is sharded.

        Every element has the initial value that ``make()`` would draw on one device. A backend that shards
        parameters gives each rank only its slices.

        Args:
            make: Builds the model on the CPU, ``lambda: Model(config)``; called once, on every rank.

        Returns:
            The model, for :meth:`fit`, for optimizers, for :meth:`load_model`.

        Raises:
            ConfigError: ``make`` returned no module.
            SelectionError: No backend fits the model.

        Example:
            >>> model = trainer.build(lambda: nn.Linear(4, 1))
            >>> optimizer = torch.optim.AdamW(model.parameters())
        """
        from tp_core.tensors import build_deferred, materialize

        preparation = self._preparation

        if not callable(make) or isinstance(make, nn.Module):
            msg = (
                f"build() takes a function that makes the model, got {type(make).__name__}; write "
                "trainer.build(lambda: Model(config)), or give a model that is made to prepare() or fit()"
            )
            raise ConfigError(msg)

        def build() -> nn.Module:
            made = make()
            check_model("build()", made)
            if preparation.precision == "bf16-true":
                return made.to(torch.bfloat16)
            return made

        model = build_deferred(build)
        if not preparation.open(model, by="build()").takes_deferred_models:
            materialize(model)
        preparation.prepare_model(model)
        return model

    def estimate(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        batch: Any = None,
        step: Step | None = None,
        *,
        devices: int | None = None,
        memory: int | str | None = None,
    ) -> "MemoryTable":
        """Return the memory that training needs per device, for every installed backend. Starts nothing.

        One step runs on tensors without memory. The model may be on the meta device, and the devices need
        not exist.

        Args:
            model: The plain model.
            optimizer: Its optimizer. Without it, two values per parameter are assumed, as for Adam.
            batch: A batch of the whole job, as the loader yields it.
            step: As for :meth:`fit`. Without batch and step the activations are unknown.
            devices: The number of devices; by default the trainer's.
            memory: The free memory of each device: bytes, or text such as "80GiB"; by default the free
                memory of this trainer's device.

        Returns:
            The verdicts with their numbers; print it to see a table.

        Raises:
            ConfigError: An argument has a wrong value.

        Example:
            >>> print(trainer.estimate(model, optimizer, batch, step, devices=8, memory="80GiB"))
        """
        from tp_trainer._memory import StepParts, estimate_job

        check_model("estimate()", model)
        check_known("estimate()", model, optimizer, step)
        if devices is not None:
            check_positive("devices", devices)
        work = StepParts(optimizer, None, step)
        backends = self._preparation.plugins.backends()
        return estimate_job(
            self._preparation.job, work, model, batch, backends, devices=devices, memory=memory
        )

    # -- whole runs -----------------------------------------------------------------------------

    @explain_arguments(
        "fit(model, optimizer, loader, step=step)",
        instead=ARGUMENTS,
        by_value=BY_VALUE,
        recognize=recognize_fit,
    )
    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train_loader: Iterable[Any],
        *,
        step: Step,
        epochs: int | None = None,
        max_steps: int | None = None,
        limits: "Limits | None" = None,
        validation: "Validation | Iterable[Any] | Mapping[str, Iterable[Any]] | None" = None,
        scheduler: "SchedulerOptions | Scheduler | None" = None,
        clip_norm: float | None = None,
        gradients: "GradientRules | None" = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        callbacks: Iterable["Callback | str"] = (),
        log: "LogOptions | LogSpec" = None,
        state: dict[str, Any] | None = None,
    ) -> "History":
        """Train ``model``, in place.

        Args:
            model: The plain model, or one that :meth:`prepare` returned.
            optimizer: An optimizer over its parameters.
            train_loader: Yields the batches. The batch size is the whole job's: each data rank gets its
                share of every batch. If each rank's loader has its own samples already, give what
                ``prepare(loader, shard=False)`` returns.
            step: ``step(model, batch)`` returns the loss, or a dict with "loss" and further
                numbers to be averaged and logged. If they are not means over samples, the dict has
                their number of units as "weight"; a metric may be a pair ``(mean, weight)``.
            epochs: The number of passes through the loader; by default one, or until another limit.
            max_steps: The total number of optimizer steps, those before a resume included.
            limits: Further limits: of time, of an epoch, of a step.
            validation: Evaluated after every epoch: a loader, a dict of loaders, with results named
                "name/...", or a `Validation` with metrics, a step and times of its own.
            scheduler: A learning-rate scheduler, stepped every epoch, or `SchedulerOptions`.
            clip_norm: The largest global norm of the gradients.
            gradients: Further rules for the gradients: the largest elements, NaN and infinite ones.
            checkpoint: Where and when to save the state of the run; a folder alone means after every
                epoch. SIGTERM, SIGUSR1 and Ctrl-C then end the run after a step, with a checkpoint.
            resume: "auto" resumes from the newest whole checkpoint in the folder, if there is one; a path
                resumes from that checkpoint.
            callbacks: Callbacks, or names of installed ones.
            log: A logger, its name, several of them, or `LogOptions`. With ``checkpoint`` the folder also
                gets a log for ``tp report``.
            state: Further objects to save and restore, by name: anything with ``state_dict`` and
                ``load_state_dict``, and plain values, lists and dicts, which are put back into this dict.

        Returns:
            The record of each epoch.

        Raises:
            ConfigError: An argument has a wrong value, or is given twice; or the folder has checkpoints of
                later steps than the run's first, or another run writes there.
            ModelError: The model is wrapped already.
            LoaderError: A loader has no length, ended early, or cannot be split over the ranks; or it
                does not fit the checkpoint's position.
            StepError: The step returned no usable loss, weight or metric.
            DisagreementError: Ranks got different arguments, or only some steps return a weight.
            NonFiniteLossError: The loss or the gradients are NaN or infinite; ``checkpoint`` keeps the last
                good state.
            StateError: The checkpoint to resume from is damaged or does not fit.
            OSError: A file cannot be written.
            Interrupted: A signal asked the run to end; its state is saved.
        """
        from tp_trainer._running._fit import fit
        from tp_trainer._running._settings import FitSettings, SchedulerOptions, limits_of, with_shortcuts
        from tp_trainer._steps._optimizer_step import GradientRules

        check_model("fit()", model)
        check_optimizer("fit()", optimizer)
        if scheduler is not None and not isinstance(scheduler, SchedulerOptions):
            scheduler = SchedulerOptions(scheduler)
        limits = limits_of(limits, epochs=epochs, max_steps=max_steps)
        settings = FitSettings(
            loop=self._loop_settings(limits, validation, checkpoint, resume, callbacks, log, state),
            train_loader=train_loader,
            step=step,
            scheduler=scheduler,
            gradients=with_shortcuts("gradients", gradients, GradientRules, clip_norm=clip_norm),
        )
        if scheduler is not None:
            check_schedule(scheduler.scheduler, scheduler.every, optimizer, epochs=limits.epochs)
        warn_evaluation_mode(model)
        try:
            with guard_stop_iteration():
                return fit(self._preparation, settings, model, optimizer)
        except Exception as error:
            explain_mistake(error)
            self._preparation.explain(error)
            raise

    @explain_arguments("loop(loader, epochs=5)", instead=LOOP_ARGUMENTS)
    def loop(
        self,
        batches: Iterable[Any],
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        limits: "Limits | None" = None,
        validation: "Validation | Callable[[], Mapping[str, float]] | None" = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = None,
        callbacks: Iterable["Callback | str"] = (),
        log: "LogOptions | LogSpec" = None,
        state: dict[str, Any] | None = None,
    ) -> "Loop":
        """Return the loop that :meth:`fit` is built on, for custom training.

        Args:
            batches: The loader, prepared or not.
            epochs: As in :meth:`fit`.
            max_steps: As in :meth:`fit`.
            limits: As in :meth:`fit`.
            validation: A function that returns the results of a validation, as :meth:`evaluate` does; called
                after every epoch. Checkpoints and callbacks get its scalar results as ``"val_..."``. Or a
                `Validation` of that function, with further times.
            checkpoint: As in :meth:`fit`; it saves ``state`` and the position of the run.
            resume: As in :meth:`fit`.
            callbacks: As in :meth:`fit`.
            log: As in :meth:`fit`; the loggers get the numbers of ``loop.log(...)``.
            state: The objects to save and restore, by name: prepared models, their optimizers and schedulers,
                anything with ``state_dict`` and ``load_state_dict``, and plain values, lists and dicts, which
                are put back into this dict.

        Returns:
            A context manager, and an iterator over the batches of all epochs.

        Raises:
            ConfigError: An argument has a wrong value, or is given twice.
            LoaderError: The loader has no length, or cannot be split over the ranks.
            DisagreementError: Ranks got different arguments.

        Example:
            >>> with trainer.loop(loader, epochs=10, state={"model": model, "optimizer": optimizer}) as loop:
            ...     for batch in loop:
            ...         optimizer.zero_grad()
            ...         loss = trainer.run(step, model, batch)
            ...         trainer.backward(loss)
            ...         optimizer.step()
            ...         loop.log(loss=loss)  # doctest: +SKIP
        """
        from tp_trainer._running._custom_loop import custom_loop
        from tp_trainer._running._settings import limits_of

        check_loader("batches", batches)
        limits = limits_of(limits, epochs=epochs, max_steps=max_steps)
        settings = self._loop_settings(limits, validation, checkpoint, resume, callbacks, log, state)
        return custom_loop(self._preparation, self._contexts, settings, batches)

    def _loop_settings(
        self,
        limits: "Limits",
        validation: Any,
        checkpoint: Checkpoints | str | os.PathLike[str] | None,
        resume: str | os.PathLike[str] | None,
        callbacks: Iterable["Callback | str"],
        log: "LogOptions | LogSpec",
        state: dict[str, Any] | None,
    ) -> "LoopSettings":
        """Return the checked arguments of ``fit`` and ``loop`` that both have, each as its object."""
        from tp_trainer._running._callbacks import CompileMonitor, Events, find_callbacks
        from tp_trainer._running._settings import (
            LogOptions,
            LoopSettings,
            Validation,
            check_state,
            from_environment,
        )

        limits, checkpoint, resume = from_environment(limits, checkpoint, resume)
        if validation is not None and not isinstance(validation, Validation):
            validation = Validation(validation)
        if not isinstance(log, LogOptions):
            log = LogOptions(log)
        chosen = find_callbacks(callbacks, self._preparation.plugins)
        if self._preparation.compile_options is not None:
            chosen[0].append(CompileMonitor())
        return LoopSettings(
            limits=limits,
            validation=validation,
            checkpoint=as_checkpoints(checkpoint, resume, validates=validation is not None),
            resume=resume,
            events=Events(*chosen),
            log=log,
            state=check_state(state),
            progress=self.progress,
        )

    # -- forward, backward and update in custom loops -------------------------------------------

    def run(self, step: Callable[..., Output], *models_and_batch: Any) -> Output:
        """Run ``step(model, batch)``, or ``step(first, second, ..., batch)``, in a custom loop.

        The step runs in the trainer's precision. On a backend with several devices per process it runs on
        all of them at once, each with its part of the batch.

        Args:
            step: Returns the loss, or a dict with "loss", and "weight" if it is not a mean over samples. It
                gets the models with their own methods and attributes.
            *models_and_batch: The prepared models, and the batch as a prepared loader yielded it. A backend
                that does not split the step also takes a tuple of batches of several loaders.

        Returns:
            The step's output for this rank's whole batch, for :meth:`backward`.

        Raises:
            ConfigError: There is no model, or no batch after the models.
        """
        *models, batch = models_and_batch or (None,)
        if not models or isinstance(batch, nn.Module) or not isinstance(models[0], nn.Module):
            raise ConfigError(_RUN)
        preparation = self._preparation
        watchdog = self._contexts.current.watchdog
        if watchdog is not None:  # in the validation of a loop, whose own batches do not count there
            watchdog.note_step()
        try:
            if self._step_state is None:
                self._step_state = StepStateWatch(self.session)
            watch = self._step_state
            if len(models) == 1:
                if self._run_step is None:
                    self._run_step = preparation.run_step()
                run_step, model = self._run_step, preparation.prepare_model(models[0])
                if watch.looks:
                    output = watch.run(lambda own: run_step(own, model, batch), step, [model], own=step)
                else:
                    output = run_step(step, model, batch)
            else:
                run = in_precision(self.session.run_several, preparation.precision, self.device)
                prepared = [preparation.prepare_model(model) for model in models]
                output = watch.run(lambda own: run(own, prepared, batch), step, prepared, own=step)
        except Exception as error:
            if not callable(step) or not all(isinstance(model, nn.Module) for model in models):
                raise ConfigError(_RUN) from None
            explain_mistake(error, batch)
            preparation.explain(error)
            raise
        if preparation.shares is not None and torch.is_grad_enabled():
            preparation.shares.note_loss(output, batch)
        return output  # type: ignore[return-value]  # a backend returns what it gets, or the same of parts

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

        A loss is a mean over the samples of its batch, or over as many units as its weight says. The batch,
        and with it each rank's number of samples, is known if :meth:`run` returned the loss. Otherwise it is
        the batch of the prepared loader under iteration. With "fp16-mixed" the loss is scaled, and
        :meth:`update` makes the step.

        Args:
            loss: This rank's loss, or a step's output: a dict with "loss", and maybe "weight".
            weight: The number of units that this rank's loss is a mean over. A loss of weight 0 counts as
                nothing and may be NaN.
            total: The number of units on all ranks, in all batches of the optimizer step, if known already.
            batch: The batch of the loss, if several loaders are iterated at once.
            retain_graph: Whether to keep the graph for another loss.
            create_graph: Whether to build the graph of the gradients, for higher derivatives.

        Raises:
            ConfigError: No model was prepared.
            StepError: The loss or its weight has a wrong type or value; or its batch is ambiguous.
            DisagreementError: Ranks' optimizers have different settings, as learning rates.

        Collectives: as in `Session.backward`; before it an all-reduce of one number, if there is a weight and
        no total. Outside of :meth:`loop` and :meth:`no_sync` the ranks compare settings of optimizers and
        sums of parameters after 2, 4, 8 and 16 passes and each 1,024: as in `Session.gather_objects`.
        """
        contexts = self._contexts
        is_plain = weight is None and batch is None and not retain_graph and not create_graph
        if is_plain and contexts.is_plain and type(loss) is Tensor and not loss.dim():
            try:
                loss.backward()
            except (RuntimeError, MemoryError) as error:
                if not loss.requires_grad:
                    raise StepError(NO_GRADIENTS) from None
                self._preparation.explain(error)
                raise
            return
        if not isinstance(loss, Tensor) or loss.dim():
            if weight is None and isinstance(loss, Mapping):
                weight = loss.get("weight")
            loss = loss_of(loss, training=True)
        preparation = self._preparation
        session, shares = preparation.current, preparation.shares
        if session is None:
            msg = "backward() comes after the preparation: trainer.prepare(model, optimizer, loader)"
            raise ConfigError(msg)
        share = None
        if shares is not None:
            if batch is None:
                share = shares.of_loss(loss)
            else:
                share = shares.of_batch(batch)
        scale = 1.0
        if preparation.scaler is not None:
            preparation.scaler.begin_backward(preparation.models())
            scale = preparation.scaler.scale
        if retain_graph or create_graph:
            graph = {"retain_graph": True, "create_graph": create_graph}
        else:
            graph = {}
        try:
            if weight is None:
                scaled = loss if scale == 1.0 else loss * scale
                session.backward(scaled, share, **graph)
            else:
                units = read_weight(weight) if share is None or share.samples else 0.0
                from tp_trainer._steps._optimizer_step import add_whole, total_weight

                if total is None:
                    total = total_weight(session, units)
                else:
                    total = read_weight(total, name="total")
                add_whole(session, loss, units, total=total, scale=scale, **graph)
        except (RuntimeError, MemoryError) as error:
            if not loss.requires_grad:
                raise StepError(NO_GRADIENTS) from None
            preparation.explain(error)
            raise
        if not self._has_run_backward:
            self._has_run_backward = True
            parameters = [p for model in preparation.models() for p in model.parameters()]
            if not any(map(is_dtensor, parameters)):  # DTensors get gradients later, when they are reduced
                warn_no_gradients(parameters, owner="any prepared model")
        current = contexts.current
        if shares is not None and self._reduces and not current.compares_ranks:
            contexts.reductions = number = contexts.reductions + 1
            if number in (1, 2, 4, 8, 16) or number % 1024 == 0:
                from tp_trainer._running._drift import note_reduction

                note_reduction(preparation, number)
        if current.unused is not None:
            current.unused.note_backward()
        if current.step_events is not None:
            current.step_events.backward_end()
        # On one device the rest of a run needs no more of most backward passes than torch's own.
        if shares is None and preparation.scaler is None and is_inherited(session.backward, Session.backward):
            contexts.is_plain = current.unused is None and current.step_events is None

    def global_loss(
        self, loss: StepOutput, *, weight: float | Tensor | None = None, batch: Any = None
    ) -> Tensor:
        """Return the loss of the global batch, the same on every rank, without gradients.

        For the closure of an optimizer: LBFGS decides by its value how many passes to make, and all ranks
        must make the same number.

        Args:
            loss: As for :meth:`backward`.
            weight: As for :meth:`backward`.
            batch: As for :meth:`backward`.

        Raises:
            StepError: As in :meth:`backward`.

        Collectives: one all-reduce of two numbers over the data ranks, if there are several.
        """
        if not isinstance(loss, Tensor) or loss.dim():
            if weight is None and isinstance(loss, Mapping):
                weight = loss.get("weight")
            loss = loss_of(loss, training=False)
        session, shares = self.session, self._preparation.shares
        session.check_in_step("global_loss()")
        share = None
        if shares is not None:
            if batch is None:
                share = shares.of_loss(loss)
            else:
                share = shares.of_batch(batch)
        loss = loss.detach().reshape(())
        if session.data_size == 1:
            return loss
        samples = 1 if share is None else share.samples
        units = samples if weight is None or not samples else read_weight(weight)
        is_sum = session.job.loss == "sum"
        if not units:
            total = loss.new_zeros((), dtype=torch.float64)
        elif is_sum:
            total = loss.double()
        else:
            total = loss.double() * units
        sums = session.reduce(torch.stack([total, torch.full_like(total, units)]), "sum")
        whole = sums[0] if is_sum else sums[0] / sums[1]
        return whole.to(loss.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the trainer's precision, for the loss of a custom loop."""
        context = autocast(self._preparation.precision, self.device)
        if context is None:
            return nullcontext()
        return context()

    def update(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> bool:
        """Make an optimizer step in a custom loop: unscale, clip, check, step.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
            clip_norm: The largest global norm of the gradients, or ``None``.
            clip_value: The largest magnitude of an element of them, or ``None``.

        Returns:
            Whether the step was made. With "fp16-mixed" a step with overflowing gradients is skipped, on
            all ranks.

        Raises:
            ConfigError: A limit is not above 0.
            StepError: It comes before any :meth:`backward`.
            NonFiniteLossError: The gradients are NaN or infinite.

        Collectives: as in `Session.clip_grad_norm`, if gradients are clipped or checked.
        """
        check_optimizer("update()", optimizer)
        preparation = self._preparation
        prepared = preparation.prepare_model(model)
        if not self._has_run_backward:
            check_gradients("update()", parameters_of(optimizer))
        from tp_trainer._steps._optimizer_step import GradientRules, OptimizerStep

        rules = GradientRules(clip_norm=clip_norm, clip_value=clip_value)
        update = OptimizerStep(self.session, prepared, optimizer, rules, scaler=preparation.scaler)
        events = self._contexts.current.step_events
        if events is not None and events.has_step_event:
            update.send_norm_to(events.optimizer_step)
            events.is_sent = True
        try:
            return update.finish()
        except (RuntimeError, MemoryError) as error:  # the optimizer's state is made in its first step
            preparation.explain(error)
            raise
        finally:
            if events is not None:
                events.is_sent = False

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate without a reduction over ranks.

        For all but the last batch of an optimizer step. Within it :meth:`backward` makes no collective.

        Args:
            model: The prepared model.

        Raises:
            ConfigError: The backend has the option of a static graph, which excludes this.
        """
        prepared = self._preparation.prepare_model(model)
        if self._preparation.scaler is not None:
            self._preparation.scaler.keep_while_accumulating(prepared)
        return self._without_reduction(self.session.no_sync(prepared))

    @contextmanager
    def _without_reduction(self, context: AbstractContextManager[None]) -> Iterator[None]:
        before, self._reduces = self._reduces, False
        try:
            with context:
                yield
        finally:
            self._reduces = before

    @explain_arguments("clip_grad_norm(model, 1.0)")
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale the gradients to a global norm of at most ``max_norm``; return the norm before.

        With "fp16-mixed" the gradients are still scaled here: clip by :meth:`update` there.

        Args:
            model: The prepared model.
            max_norm: The largest L2 norm of all gradients together; with ``inf`` nothing is scaled.

        Returns:
            The norm before scaling, a scalar tensor that is equal on all ranks.

        Raises:
            ConfigError: ``max_norm`` is not above 0.
            StepError: It comes before any :meth:`backward`.

        Collectives: as in `Session.clip_grad_norm`.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        """
        check_limit("max_norm", max_norm)
        prepared = self._preparation.prepare_model(model)
        if not self._has_run_backward:
            check_gradients("clip_grad_norm()", model.parameters())
        return self.session.clip_grad_norm(prepared, max_norm)

    # -- evaluation, predictions, gathered rows -------------------------------------------------

    @explain_arguments("evaluate(model, loader, step=step)", instead=ARGUMENTS)
    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        step: Step,
        metrics: "Mapping[str, Metric] | None" = None,
        shard: bool = True,
    ) -> dict[str, Any]:
        """Return the means of the step's outputs over the samples of ``loader``, and the metrics, by name.

        Each sample, or unit of the step's weights, counts once, for any number of ranks and any size of the
        last batch. Training is not affected.

        Args:
            model: The plain model, or the prepared one.
            loader: Yields the batches. For a dict of loaders, results are named "name/...".
            step: ``step(model, batch)`` returns the loss, or a dict of numbers to be averaged, with or
                without "loss". Under a metric's name it returns the arguments of its ``update``: a tuple, a
                dict, or one value, which are not averaged.
            metrics: Objects with ``update``, ``compute`` and ``reset``, by name: of torchmetrics, torcheval,
                or :class:`FunctionMetric`. On every rank each gets all samples in the order of the data. It
                keeps its state afterwards.
            shard: Whether to split the loader over the data ranks.

        Returns:
            Means and scalar metrics as floats, larger results of metrics as tensors on the CPU; an empty
            dict for a loader without samples.

        Raises:
            ConfigError: The model, a loader, the step, a metric or a name cannot be used.
            LoaderError: A loader cannot be split over the ranks.
            StepError: The step returned what cannot be averaged, or nothing for a metric; or the metric
                raised an error.
            DisagreementError: Settings of a prepared optimizer differ by rank.

        Collectives: as in `Session.gather_objects`, broadcasts of buffers, gathers for the metrics, a gather
        and an all-reduce for the means.
        """
        return self._evaluation.evaluate(model, loader, step=step, metrics=metrics, shard=shard)

    @explain_arguments("predict(model, loader, step)", instead=ARGUMENTS)
    def predict(
        self, model: nn.Module, loader: Iterable[Any], step: Step, *, shard: bool = True
    ) -> "Predictions":
        """Return the step's outputs for the samples of ``loader``, in their order, each sample once.

        Args:
            model: The plain model, or the prepared one. It runs in evaluation mode, without gradients.
            loader: Yields the batches.
            step: ``step(model, batch)`` returns values with a row for each sample of the batch: tensors,
                arrays or lists, alone or in dicts and tuples.
            shard: Whether to split the loader over the data ranks.

        Returns:
            An iterable over pieces of the predictions, on every rank; or call its ``collect()`` or
            ``save(path)``.

        Raises:
            ConfigError: The model, the loader or the step cannot be used.
            LoaderError: The loader cannot be split over the ranks.

        Example:
            >>> def step(model, batch):
            ...     return {"class": model(batch[0]).argmax(1)}
            >>> trainer.predict(model, loader, step).save("classes.jsonl")  # doctest: +SKIP
        """
        return self._evaluation.predict(model, loader, step, shard=shard)

    def gather_for_metrics(self, value: Any, *, batch: Any = None) -> Any:
        """Return the rows of all data ranks, each sample once, on every rank, to compute metrics from.

        Stand-in samples are left out.

        Args:
            value: A tensor with a row for each sample of this rank's batch, (samples, ...), or a dict, list
                or tuple of such tensors. A scalar is one row.
            batch: The batch of the rows, if several loaders are iterated at once.

        Returns:
            The same with the rows of all ranks, in the order of the global batch, without gradients.

        Raises:
            StepError: ``value`` holds something else than tensors; or its batch is not known; or this is a
                step, or the forward of a model, that has one device's part of the batch.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes, then `Session.gather` for each tensor.
        """
        return self._evaluation.gather_rows(value, batch=batch)

    def all_gather(self, rows: Tensor, *, batch: Any = None) -> Tensor:
        """Return the rows of all data ranks and devices, with gradients, for losses that compare samples.

        Call it in a step or in a custom loop, on all ranks. If every rank computes the same loss from
        all rows, the gradient is the one of a single device on the whole batch.

        Args:
            rows: The rows of this rank's samples, (samples, ...).
            batch: The batch of the rows, if a custom loop iterates several loaders at once.

        Returns:
            The rows of all ranks in the order of the global batch, (samples of all ranks, ...).

        Raises:
            StepError: There are no rows; or not all parts of the batch, or not all ranks, take part; or it is
                called in the forward of a model, or outside a step, on a backend that splits the batch.
            DisagreementError: The ranks' tensors differ in more than their first dimension.

        Collectives: an all-gather of the shapes and two of `Session.gather`; in the backward pass one
        all-reduce.
        """
        return self._evaluation.gather_with_gradients(rows, batch=batch)

    # -- models in files ------------------------------------------------------------------------

    def save_model(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
        """Write the model's state, with the plain model's names; call it on every rank.

        A crash during the write leaves the old file unchanged.

        Raises:
            ConfigError: The name ends in ".safetensors", and such files are read in that format.
            OSError: The file cannot be written; on every rank.
            DisagreementError: Settings of an optimizer differ by rank.

        Collectives: the backend's gathering of the state, two all-gathers of objects.
        """
        self._files.save(model, path)

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Load a model that :meth:`save_model` wrote on any backend; call it on every rank.

        It also loads weights of :meth:`export` or another program: a safetensors file, an index of several,
        or their folder. And it loads the folder of a checkpoint, of a run or of ``tp_shard.save_sharded``. If
        that has the trained weights alone, the model must have the frozen ones of the run. Of an adapter in
        peft's format it loads the weights into the same adapter of the model.

        Args:
            model: The model.
            path: The file or folder.
            name: The name in ``state={...}`` of one of a checkpoint's several models; or of the model's
                adapter, by default the active one.

        Raises:
            ConfigError: ``name`` is given, and ``path`` is not a checkpoint of several models; or the model
                has no such adapter.
            FileNotFoundError: The file does not exist.
            StateError: The file is damaged, or is of another model; the model is unchanged.
        """
        self._files.load(model, path, name=name)

    @explain_arguments("export(model, path)")
    def export(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        adapter: bool = False,
        merged: bool = False,
        max_file_nbytes: int | None = None,
    ) -> None:
        """Write the weights as safetensors files, which load without tp; call it on every rank.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it into the plain model. Tied
        weights are written under each of their names. A crash during the write leaves the old file
        unchanged. If the backend shards tensors, one tensor at a time is whole in memory.

        Args:
            model: The model.
            path: The file, which ends in ".safetensors"; with ``adapter`` a folder.
            adapter: Whether to write the adapters of a ``PeftModel`` alone, in peft's format, which
                ``PeftModel.from_pretrained(base, path)`` loads. Those beside "default" get a folder each.
            merged: Whether to merge the active adapters of a ``PeftModel`` into the weights, and write these
                under the names that they had before peft.
            max_file_nbytes: The largest size of a file in bytes. Larger weights are written as
                ``model-00001-of-00003.safetensors`` and so on, with an index, as by Hugging Face's libraries.

        Raises:
            ConfigError: The file's name does not end in ".safetensors"; or adapters are wanted and there are
                none, or cannot be merged.
            OSError: A file cannot be written; on every rank.
            StateError: The model's state holds something that is not a tensor.

        Collectives: the backend's gathering of the state, one all-gather of objects; for each adapter two,
        and a broadcast.
        """
        self._files.export(model, path, adapter=adapter, merged=merged, max_file_nbytes=max_file_nbytes)

    def verify(self, *, steps: int | None = None, timeout_s: float = 600.0) -> "Verification":
        """Prove that this script trains the same after a stop, and on each backend that fits.

        ``tp verify`` runs the whole script again, with its arguments, in other processes: on one device;
        ended by a SIGTERM and resumed; then on each backend. It names the first number that differs. There,
        this call returns at once, and its result is true. It needs tp-verify.

        Args:
            steps: The optimizer steps of each run, from 2; by default 12, or 4 beyond the first epoch where
                that has 60 at most.
            timeout_s: The seconds that each run may take.

        Raises:
            ConfigError: tp-verify is not installed, this process is one of several, the program is no script,
                or the script does not train on one device.
            PluginError: tp-verify is broken or blocked.

        Example:
            >>> print(trainer.verify())  # doctest: +SKIP
        """
        from tp_trainer._verify import verify_this_script

        return verify_this_script(steps=steps, timeout_s=timeout_s, world_size=self.environment.world_size)


# The arguments that a run reads when the trainer is made, and never again; `progress` is an attribute.
_SETTINGS = inspect.signature(Trainer).parameters.keys() - {"progress"}


def _compile_options(value: object) -> CompileOptions | None:
    if isinstance(value, CompileOptions):
        return value
    if isinstance(value, bool):
        if value:
            return CompileOptions()
        return None
    if value == "blocks":
        return CompileOptions(blocks=True)
    msg = f"compile must be True, False, 'blocks' or CompileOptions(...), got {value!r}"
    raise ConfigError(msg)
