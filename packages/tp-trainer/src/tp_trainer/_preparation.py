"""From the trainer's settings to an open session, and the models, optimizers and loaders prepared for it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core.data import PreparedLoader
from tp_core.discovery import PluginRegistry, Selection
from tp_core.errors import ConfigError
from tp_core.jobs import CompileOptions, Precision
from tp_core.output import get_logger
from tp_core.plugins import Job, Session
from tp_core.random import seed_everything, seed_of

from tp_trainer._checks import check_model
from tp_trainer._opening._session import LazySession
from tp_trainer._steps._step import LossScaler, RunStep, in_precision, warn_batch_statistics

if TYPE_CHECKING:
    from tp_trainer._memory import StepParts
    from tp_trainer._steps._loaders import BatchShares, Epochs

log = get_logger("tp_trainer")

T = TypeVar("T")


class Preparation:
    """Opens the session for the first model, and prepares models, optimizers and loaders for it.

    Args:
        lazy: The session, opened for the first model.
        seed: The user's seed.
        precision: As for `Trainer`.
        compile_options: How to compile models, or ``None``.

    Attributes:
        current: The session, or ``None`` before the first model.
        scaler: The scale of the losses, with "fp16-mixed".
        shares: The shares of the batches that loaders yielded; ``None`` with a single data rank.
        first_versions: Of frozen parameters and buffers, before a loop of the user's own; see `DriftWatch`.
        warns_of_drift: Whether no loop of the user's own was told yet that ranks hold different parameters.
        make_trial: With "fastest", returns a trainer with these settings on a named backend. ``fit`` times it
            before anything is opened. ``None`` once the backend is chosen.
    """

    def __init__(
        self,
        lazy: LazySession,
        *,
        seed: int | None,
        precision: Precision,
        compile_options: CompileOptions | None,
        make_trial: Callable[..., Any] | None,
    ) -> None:
        self._lazy = lazy
        self.seed = seed
        self.precision = precision
        self.compile_options = compile_options
        self.make_trial = make_trial
        self.scaler = LossScaler() if precision == "fp16-mixed" else None
        self.current: Session | None = None
        self.shares: BatchShares | None = None
        self.first_versions: dict[str, tuple[int, int] | None] = {}
        self.warns_of_drift = True
        self._choice = ""  # the line on the backend, until a run has shown it
        self._epochs: Epochs | None = None
        self._drawn_from: int | None = (
            None  # the seed of the numbers that training drew for a share of batches
        )
        # In the order of their preparation, which all ranks have: what a rank has forgotten keeps its place.
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._latest: Callable[[], nn.Module | None] = lambda: None  # the model that was prepared last

    # -- the session ----------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session; the first access starts the job."""
        return self.open(by="trainer.session")

    @property
    def job(self) -> Job:
        """The job as the trainer was given it, without a model."""
        return self._lazy.job

    @property
    def plugins(self) -> PluginRegistry:
        return self._lazy.plugins

    @property
    def selection(self) -> Selection:
        return self._lazy.selection

    def choose(self, model: nn.Module, work: "StepParts") -> tuple[Selection, Job]:
        """Return the selection for a model by the memory of its steps, and the job with this memory.

        Nothing is opened.
        """
        return self._lazy.choice(model, lambda job: _with_memory(job, work))

    def require(self, backend: str, reason: str, estimated: Job) -> None:
        """Choose the backend that was timed as the fastest, for the job of :meth:`choose`."""
        self.make_trial = None
        self._lazy.require(backend, reason, estimated)

    def open(self, *models: nn.Module, by: str, work: "StepParts | None" = None) -> Session:
        """Return the session, after a check that its backend fits the models.

        Args:
            *models: The models.
            by: The call that opens it, for messages.
            work: What is known of the job's steps, to estimate their memory.

        Raises:
            ConfigError: Steps are to be timed first.
            SelectionError: No backend fits.
        """
        if self.make_trial is not None:
            msg = f"backend='fastest' times steps of fit(), and {by} comes before it: call fit(), or name one"
            raise ConfigError(msg)
        session = self._lazy.open(*models, by=by, estimate=lambda job: _with_memory(job, work))
        if self.current is None:
            self._note_opened(session)
        return session

    def _note_opened(self, session: Session) -> None:
        self.current = session
        recomputed = session.job.recomputation
        if session.is_main and recomputed not in (None, "nothing"):
            log.info("the backward pass computes %s again, to save memory", recomputed)
        if session.world_size > 1 or len(session.job.devices) > 1:
            self._choice = str(self.selection).partition("\n")[0]
        if session.data_size == 1:
            return
        from tp_trainer._steps._loaders import BatchShares

        self.shares = BatchShares(session)
        if self.seed is not None and session.data_rank:
            # From here on dropout, noise and augmentation must differ between data ranks. The first one goes
            # on as one device does: the models that a program makes later are broadcast from it.
            seed_everything(seed_of((self.seed, session.data_rank, 2)))

    @contextmanager
    def noting_draws(self) -> Iterator[None]:
        """Note whether training draws random numbers, which it does for shares of the batches."""
        session = self.session
        is_whole = session.data_size == len(session.job.devices) == 1 and not session.runs_step_in_parts
        if self.seed is None or is_whole:
            yield
            return
        before = torch.get_rng_state()
        try:
            yield
        finally:
            if not torch.equal(before, torch.get_rng_state()):
                self._drawn_from = torch.initial_seed()

    def _warn_draws(self) -> None:
        """Warn that a model may begin with other weights than on one device, unless it was seeded."""
        if self._drawn_from == torch.initial_seed() and self.session.is_main:
            log.warning(
                "training has drawn random numbers, for shares of the batches (dropout, augmentation, seeds "
                "of micro-batches), so a model that was made after it begins with other weights than on one "
                "device; make models before, or seed before each: torch.manual_seed(...)"
            )
        self._drawn_from = None

    def take_choice(self) -> str:
        """Return the line on the chosen backend for the first run; later runs get an empty one."""
        choice, self._choice = self._choice, ""
        return choice

    def close(self) -> None:
        """Close the session and the streams of loaders; calling it again does nothing."""
        if self._epochs is not None:
            self._epochs.close()
        if self.current is not None:
            self.current.close()

    def explain(self, error: BaseException) -> None:
        """Add a note to an error if memory has run out."""
        from tp_trainer._memory import explain_out_of_memory

        explain_out_of_memory(error, lambda: self.selection)

    # -- models, optimizers, loaders, steps -----------------------------------------------------

    def models(self) -> Iterator[nn.Module]:
        """Yield the prepared models."""
        return self._lazy.models()

    def named_models(self) -> dict[str, nn.Module]:
        """Return the prepared models, by names that they have on all ranks."""
        return _named("model", self._models)

    def known_model(self, model: nn.Module) -> nn.Module | None:
        """Return the prepared model of a module, or ``None`` if it was not prepared."""
        return self._lazy.prepared(model)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Prepare a model once; a prepared one is returned as it is."""
        if model is not None and self._latest() is model:  # as in every step of a custom loop
            return model
        check_model("the trainer", model)
        prepared = self._lazy.prepared(model)
        if prepared is None:
            session = self.open(model, by="the preparation of a model")
            if self.precision == "bf16-true":
                model.to(torch.bfloat16)
            if session.job.recomputation is not None:
                from tp_trainer._activations import recompute

                recompute(model, session.job.recomputation)
            self._warn_draws()
            prepared = session.prepare_model(model)
            warn_batch_statistics(session, prepared)
            if self.compile_options is not None:
                session.compile_model(prepared)
            self._lazy.note_prepared(model, prepared)
            self._models.append(weakref.ref(prepared))
        self._latest = weakref.ref(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer; with "fp16-mixed" it refuses scaled gradients."""
        if self.scaler is not None:
            self.scaler.guard(optimizer)
        prepared = self.session.prepare_optimizer(optimizer)
        if prepared not in self.optimizers().values():
            self._optimizers.append(weakref.ref(prepared))
        return prepared

    def optimizers(self) -> dict[str, Optimizer]:
        """Return the prepared optimizers, by names that they have on all ranks."""
        return _named("optimizer", self._optimizers)

    def prepare_loader(
        self, loader: Iterable[Any], *, shard: bool = True, training: bool = True, watched: bool = False
    ) -> PreparedLoader:
        """Prepare a loader; a prepared one is returned as it is.

        With ``watched`` the shares of its batches are noted, for a loop of the user's own.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        prepared = self.session.prepare_loader(loader, training=training, shard=shard)
        if watched and self.shares is not None:
            self.shares.watch(prepared, training=training)
        return prepared

    def prepare_named(self, loaders: Mapping[str, Iterable[Any]]) -> dict[str, PreparedLoader]:
        """Prepare the loaders of a validation."""
        return {name: self.prepare_loader(loader, training=False) for name, loader in loaders.items()}

    @contextmanager
    def continued(self, loader: Iterable[Any], prepared: PreparedLoader) -> Iterator[None]:
        """Begin a loader at the epoch after its last one, and note where its training ends."""
        from tp_trainer._steps._loaders import Epochs

        epochs = self._epochs = self._epochs or Epochs()
        epochs.go_on(loader, prepared)
        try:
            yield
        finally:
            epochs.note(loader, prepared)

    def run_step(self, batches: PreparedLoader | None = None) -> RunStep:
        """Return what runs a step in the trainer's precision, on a loader that the trainer iterates."""
        session = self.session
        run = in_precision(session.run, self.precision, session.device)
        if batches is None or self.shares is None:
            return run
        return self.shares.in_steps(run, batches)


def _named(kind: str, references: "list[weakref.ref[T]]") -> dict[str, T]:
    """Return what lives of some objects, each by its kind, and its number if there are several."""
    if len(references) == 1:
        names = [kind]
    else:
        names = [f"{kind} {number}" for number in range(len(references))]
    living = {name: reference() for name, reference in zip(names, references, strict=True)}
    return {name: value for name, value in living.items() if value is not None}


def _with_memory(job: Job, work: "StepParts | None") -> Iterable[Job]:
    from tp_trainer._memory import StepParts, add_memory

    return add_memory(job, work or StepParts())
