"""The options of backends, the choice of one, and the opening of its session."""

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tp_core.discovery import PluginRegistry, Selection, check_backend_name, select
from tp_core.errors import ConfigError, ModelError, PluginError, SelectionError
from tp_core.plugins import Backend, Job, NoOptions, Session
from tp_core.sessions import PerModule

from tp_trainer._opening._uncaught import end_after_failure

Options = object | Sequence[object] | Mapping[str, object]
"""An object of a backend's ``options_type``, a list of them, or a dict by the backends' names."""


def options_by_backend(given: Options | None, plugins: PluginRegistry) -> dict[str, Any]:
    """Return the options by the names of their backends.

    Args:
        given: One object, such as ``DdpOptions(static_graph=True)``, several in a list or tuple, or a mapping
            from a backend's name to such an object or to a mapping of its fields.
        plugins: The registry with the backends.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    backend_of = {c.item.options_type: c.item.name for c in plugins.backends()}
    backend_of.pop(NoOptions, None)
    options: dict[str, Any] = {}
    values = given if isinstance(given, list | tuple) else [given]
    for value in values:
        name = backend_of.get(type(value))
        if name is None:
            types = ", ".join(sorted(kind.__name__ for kind in backend_of))
            msg = (
                f"options must be objects of {types}, the options of the installed backends, or a dict by "
                f"backends' names, got {type(value).__name__}: {value!r:.100}"
            )
            raise ConfigError(msg)
        if name in options:
            msg = f"options has two of {type(value).__name__}, both for backend {name!r}; give one"
            raise ConfigError(msg)
        options[name] = value
    return options


# -- The choice of a backend, and its check against each later model ------------------------------


def joined(models: Sequence[nn.Module]) -> nn.Module | None:
    """Return all models as a job's model: the only one, a ModuleList of several, ``None`` for none."""
    if len(models) > 1:
        return nn.ModuleList(models)
    if models:
        return models[0]
    return None


def choose(job: Job, plugins: PluginRegistry, name: str) -> Selection:
    installed = plugins.backends()
    _check_options(job, {c.item.name: c.item for c in installed})
    try:
        return select(job, installed, name=name)
    except SelectionError as error:
        _require(plugins, name)
        if job.traits is not None and job.traits.has_dtensors:
            raise ModelError(_about_dtensors(str(error))) from error
        _note_broken(plugins, error)
        raise


def check_name(plugins: PluginRegistry, name: str) -> None:
    """Refuse a misspelled backend before anything is built; for "auto" check ``TP_BACKEND``."""
    try:
        check_backend_name(name, {c.item.name for c in plugins.backends()})
    except SelectionError as error:
        _require(plugins, name)
        _note_broken(plugins, error)
        raise


def _require(plugins: PluginRegistry, name: str) -> None:
    if name == "auto":
        name = os.environ.get("TP_BACKEND", "auto")
    plugins.require(name)


def _note_broken(plugins: PluginRegistry, error: SelectionError) -> None:
    for broken in plugins.broken():
        error.add_note(str(broken))


def check_choice(
    selection: Selection, job: Job, plugins: PluginRegistry, name: str, *, opened_by: str, known: bool
) -> None:
    """Make sure that the backend of a running session fits models that came later."""
    chosen = selection.chosen.name
    verdict = selection.backend.assess(job)
    models = "with the models before" if known else "without a model"
    when = f"when {opened_by} started the job, {models}"
    if known:
        remedy = "give all models in one call, prepare(model, other, ...)"
    else:
        remedy = "call fit(model, ...) or prepare(model, ...) before it"
    if not verdict.is_fit:
        reason = verdict.reason
        if verdict.remedy:
            reason += f"; {verdict.remedy}"
        msg = f"backend {chosen!r} was chosen {when}, and does not fit this model: {reason}; {remedy}"
        if job.traits is not None and job.traits.has_dtensors:
            raise ModelError(_about_dtensors(msg))
        raise SelectionError(msg)
    if not known and selection.asked_by == "auto":
        best = choose(job, plugins, name).chosen
        if best.name != chosen:
            msg = (
                f"backend {chosen!r} was chosen {when}, and for this model it would be {best.name!r} "
                f"({best.verdict.reason}); {remedy}, or ask for one by name: Trainer(backend={chosen!r})"
            )
            raise SelectionError(msg)


def _about_dtensors(reasons: str) -> str:
    return (
        "the model has DTensors (of fully_shard, parallelize_module or distribute_tensor), which only a "
        "backend made for them can train; leave those calls out, and give the plain model, which a backend "
        "shards by itself ('fsdp', or 'shard' for what parallelize_module does; fully_shard alone, over one "
        f"mesh of all ranks, may stay): {reasons}"
    )


def _check_options(job: Job, installed: Mapping[str, Backend[Any]]) -> None:
    """Refuse misspelled options, also of a backend that is not chosen this time."""
    for name in job.options:
        if name not in installed:
            msg = (
                f"options are given for backend {name!r}, which is not installed; "
                f"installed: {', '.join(sorted(map(repr, installed)))}"
            )
            kinds = {backend.options_type for backend in installed.values()}
            having = sorted(k.__name__ for k in kinds if name in getattr(k, "__dataclass_fields__", ()))
            if having:
                choices = " or ".join(f"{kind}({name}=...)" for kind in having)
                msg = f"{name!r} is an option of a backend, not the name of one; write options={choices}"
            raise ConfigError(msg)
        installed[name].parse_options(job)


# -- Opening the session of a selected backend, for `Trainer` and `ParallelTrainer` ---------------


def open_session(selection: Selection, job: Job, facts: Mapping[str, Any]) -> Session:
    """Open ``job`` on the selected backend, after a check that all ranks have the same facts.

    The session's seed is rank 0's. A session that is still open is closed when the process exits.

    Args:
        selection: The backend that runs the job.
        job: The job.
        facts: Further values that must be equal on all ranks, representable in JSON.

    Raises:
        DisagreementError: The ranks chose different backends, options or facts.
        PluginError: The backend opened something that is not a session.

    Collectives: an exchange through the launcher's store, then what the backend needs to connect its ranks.
    """
    chosen = f"{selection.chosen.name!r} of {selection.chosen.origin}"
    options = dict(job.options)  # of all: the chosen backend may open another one
    if job.environment.is_distributed:
        end_after_failure()
    seed = job.seed
    if job.environment.world_size > 1:
        from tp_trainer._opening._agreement import check_same_at_start

        facts = {"backend": chosen, "options": options, **facts}
        seed = check_same_at_start(job.environment, facts, seed=seed)
    try:
        session = selection.backend.open(replace(job, seed=seed))
    except Exception as error:
        error.add_note(f"while opening backend {chosen}")
        raise
    if not isinstance(session, Session):
        msg = f"backend {chosen} must open a Session, got {type(session).__name__}"
        raise PluginError(msg)
    # Its first model may end before it: a program may train one model after another.
    session.job = replace(session.job, model=None)
    # By a weak reference: atexit would keep the session alive until the process exits.
    atexit.register(_close_at_exit, weakref.ref(session))
    return session


def _close_at_exit(reference: weakref.ref[Session]) -> None:
    session = reference()
    # Not after an uncaught exception: closing may wait for the other ranks, which do not close with this one.
    if session is not None and not hasattr(sys, "last_value"):
        session.close()


class LazySession:
    """The session of a trainer: opened for the first model, checked against later ones."""

    def __init__(
        self,
        job: Job,
        plugins: PluginRegistry,
        backend: str,
        *,
        seed: int | None,
    ) -> None:
        self._job = job
        self.plugins = plugins
        self._backend = backend
        self._seed = seed
        self._selection: Selection | None = None
        self._asked_by = ""
        self._estimated: Job | None = None  # the job with its memory, where the backend was chosen before
        self._opened_by = ""
        self._assessed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that the backend fits
        self._has_assessed = False  # whether there were any: they may have ended
        self._prepared: PerModule[nn.Module] | None = None  # from the first model on
        self.current: Session | None = None

    @property
    def job(self) -> Job:
        return self._job

    @property
    def selection(self) -> Selection:
        """The selection of the backend; before the session is open, the one for an unspecified model."""
        if self._selection is None:
            return choose(self._job, self.plugins, self._backend)
        return self._selection

    def choice(self, model: nn.Module, estimate: Callable[[Job], Iterable[Job]]) -> tuple[Selection, Job]:
        """Return the selection for a model and its job, without opening anything.

        ``estimate`` is as for :meth:`open`.
        """
        return self._select([model], estimate)

    def require(self, backend: str, why: str, estimated: Job) -> None:
        """Choose the backend before the session is open; the selection names the reason.

        ``estimated`` is the job of :meth:`choice`: its memory is not estimated again.
        """
        self._backend = backend
        self._asked_by = why
        self._estimated = replace(estimated, model=None)  # the model may end before the session opens

    def open(
        self, *models: nn.Module, by: str, estimate: Callable[[Job], Iterable[Job]] | None = None
    ) -> Session:
        """Return the session, after a check that its backend fits the models, if any are known.

        ``estimate`` yields the job with its memory needs, and then with less and less memory, until a backend
        is chosen with which it fits; it is called on all ranks, unless the models are small.
        """
        session = self.current
        if session is None:
            session = self._start(models, by, estimate)
        elif not self._assessed.issuperset(models):
            new = [model for model in models if model not in self._assessed]
            job = replace(self._job, model=joined([*self._assessed, *new]), seed=session.job.seed)
            check_choice(
                self.selection,
                job,
                self.plugins,
                self._backend,
                opened_by=self._opened_by,
                known=self._has_assessed,
            )
        self._assessed.update(models)
        self._has_assessed = self._has_assessed or bool(models)
        return session

    def prepared(self, model: nn.Module) -> nn.Module | None:
        """Return the prepared model of a module, or of a prepared model itself; ``None`` if there is none."""
        if self._prepared is None:
            return None
        return self._prepared.get(model)

    def note_prepared(self, model: nn.Module, prepared: nn.Module) -> None:
        if self._prepared is None:
            self._prepared = PerModule()
        self._prepared[model] = self._prepared[prepared] = prepared
        self._assessed.add(prepared)  # the backend fits what it has returned

    def models(self) -> Iterator[nn.Module]:
        yield from self._prepared or ()

    def _start(
        self, models: Sequence[nn.Module], by: str, estimate: Callable[[Job], Iterable[Job]] | None
    ) -> Session:
        if self._job.environment.is_distributed:
            end_after_failure()
        selection, job = self._select(models, estimate)
        verdict = selection.chosen.verdict
        if verdict.lacks_memory and job.environment.is_main:
            msg = (
                f"backend {selection.chosen.name!r} ({selection.asked_by}) {verdict.reason}; {verdict.remedy}"
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)
        facts = {
            "kind of loss": job.loss,
            "seed": self._seed,
            "precision": job.precision,
            "accumulate": job.accumulate,
            "compile": job.compile,
            "activation checkpointing": job.recomputation,
            "version of torch": torch.__version__,
        }

        session = open_session(selection, job, facts)
        self._selection, self.current, self._opened_by = selection, session, by
        return session

    def _select(
        self, models: Sequence[nn.Module], estimate: Callable[[Job], Iterable[Job]] | None
    ) -> tuple[Selection, Job]:
        """Return the selection for models, and the job with what the backward pass computes again."""
        if self._seed is None:
            seed = torch.initial_seed()
        else:
            seed = self._seed
        job = replace(self._job, model=joined(models), seed=seed)
        jobs: Iterable[Job] = [job]
        # Every rank knows the size without an exchange; for a small model a measurement is not worth it.
        is_small = job.is_small(None)
        if self._estimated is not None:
            jobs = [replace(self._estimated, model=job.model, seed=seed)]
            self._estimated = None  # if the session does not open, the next call may be for another model
        elif estimate is not None and job.traits and not is_small:
            jobs = estimate(job)
        for job in jobs:
            selection = choose(job, self.plugins, self._backend)
            if self._asked_by:
                selection = replace(selection, asked_by=self._asked_by)
            if not selection.chosen.verdict.lacks_memory:
                break
        return selection, job
