"""What all parts of a trainer stand on: its arguments, its session, and its prepared models."""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from tp_core import DeviceSpec, LaunchEnvironment, resolve_devices
from tp_core.internal import Progress, device_of_rank, seed_everything, shows_progress
from tp_core.plugins import (
    Job,
    LossReduction,
    PluginRegistry,
    Precision,
    PreparedLoader,
    Selection,
    Session,
    registry,
)

from tp_trainer._checks._objects import check_model
from tp_trainer._checks._values import check_loss, check_positive, check_seed
from tp_trainer._opening._session import LazySession, Options, check_name, options_by_backend
from tp_trainer._steps._loaders import BatchShares, Epochs
from tp_trainer._steps._step import LossScaler, RunStep, check_precision, in_precision

if TYPE_CHECKING:
    from tp_trainer._memory._work import Work
    from tp_trainer._opening._boundaries import StepBoundaries
    from tp_trainer._running._custom_loop import ManualStepEvents

__all__ = ["TrainerBase"]

# What only runs and files need is imported there: a trainer is made in programs that do not train, too.


class TrainerBase:
    """Knows who this process is, opens the session when it is needed, and prepares each model once.

    Its arguments are those of :class:`tp_trainer.Trainer`.
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
        self._has_gone_back = False  # in a custom loop
        self._run: RunStep | None = None
        self._step_events: ManualStepEvents | None = None  # of a loop that is open, if somebody wants them
        self._boundaries: StepBoundaries | None = None  # within the validation of a loop that signals may end
        self._shares: BatchShares | None = None  # where there are several data ranks
        self._epochs = Epochs()
        self._scaler = LossScaler() if precision == "fp16-mixed" else None
        explicit = devices not in (None, "auto")
        self._devices = _devices_here(devices, self.environment, explicit=explicit)
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
        self._prepared_last: Callable[[], nn.Module | None] = lambda: None
        if seed is not None:
            seed_everything(seed)

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

    def _open(self, *models: nn.Module, by: str, work: "Work | None" = None) -> Session:
        def add_memory(job: Job) -> Job:
            from tp_trainer._memory import _work

            return _work.add_memory(job, work or _work.Work())

        is_open = self._lazy.current is not None
        session = self._lazy.open(*models, by=by, estimate=add_memory)
        if not is_open and session.data_size > 1:
            self._shares = BatchShares(session)
            if self._seed is not None:
                # Models are made alike on all ranks; dropout and augmentation must not be.
                seed_everything(self._seed + session.data_rank * 1_000_003)
        return session

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

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model once; a prepared one is returned as it is."""
        if model is not None and self._prepared_last() is model:  # as in every step of a custom loop
            return model
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
        self._prepared_last = weakref.ref(prepared)
        return prepared

    def _loader(
        self, loader: Iterable[Any], *, shard: bool, training: bool = True, watched: bool = False
    ) -> PreparedLoader:
        """Prepare a loader; a prepared one is returned as it is.

        Args:
            loader: The loader.
            shard: Whether it is split over the data ranks.
            training: Whether it is to train on.
            watched: Whether the trainer takes note of the shares of its batches, for custom loops.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        prepared = self.session.prepare_loader(loader, training=training, shard=shard)
        if watched and self._shares is not None:
            self._shares.watch(prepared, training=training)
        return prepared

    def _run_step(self) -> RunStep:
        """Return what runs a step in the trainer's precision; the session's own way where it can."""
        return in_precision(self.session.run, self._precision, self.device)

    def close(self) -> None:
        """End what was started; calling it again does nothing."""
        self._epochs.close()
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _devices_here(
    devices: DeviceSpec, environment: LaunchEnvironment, *, explicit: bool
) -> tuple[torch.device, ...]:
    """Return the devices of this process: under a launcher one of those of its host."""
    found = resolve_devices(devices)
    return (device_of_rank(found, environment, explicit=explicit),) if environment.is_distributed else found
