"""The session of a trainer: opened when the first model comes, and checked against those that come later."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from tp_core.plugins import Job, PluginRegistry, Selection, Session

from tp_trainer._opening._choice import check_choice, choose, joined

__all__ = ["LazySession"]


class LazySession:
    """The session of a trainer: opened when the first model comes.

    Args:
        job: What is to be done, without a model and a seed.
        plugins: The registry with the backends.
        backend: The name of the backend that was asked for, or "auto".
        seed: The seed that was asked for, or ``None``.

    Attributes:
        current: The session; ``None`` before it is opened.
        plugins: The registry.
    """

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
        self._opened_by = ""
        self._assessed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that the backend fits
        self.current: Session | None = None

    @property
    def job(self) -> Job:
        """What is to be done, without a model."""
        return self._job

    @property
    def selection(self) -> Selection:
        """How the backend was chosen; before that, how it would be for an unspecified model."""
        return choose(self._job, self.plugins, self._backend) if self._selection is None else self._selection

    def open(self, *models: nn.Module, by: str, estimate: Callable[[Job], Job] | None = None) -> Session:
        """Return the session, once the backend that runs it is known to fit the models.

        Args:
            *models: Those that are to be prepared; none where no model is known.
            by: What asks, for messages.
            estimate: Returns the job with what it needs of the devices' memory; called where a backend is
                to be chosen, on all ranks.

        Raises:
            ModelError: A model has DTensors, and no backend takes them.
            SelectionError: No backend fits; or that of the running session does not fit these models.
        """
        session = self.current
        if session is None:
            session = self._start(models, by, estimate)
        elif not self._assessed.issuperset(models):
            known = list(self._assessed)
            new = [model for model in models if model not in self._assessed]
            job = replace(self._job, model=joined([*known, *new]), seed=session.job.seed)
            check_choice(
                self.selection,
                job,
                self.plugins,
                self._backend,
                opened_by=self._opened_by,
                known=bool(known),
            )
        self._assessed.update(models)
        return session

    def note_fitting(self, model: nn.Module) -> None:
        """Note that the backend fits ``model``, which it has made itself."""
        self._assessed.add(model)

    def _start(self, models: Sequence[nn.Module], by: str, estimate: Callable[[Job], Job] | None) -> Session:
        seed = torch.initial_seed() if self._seed is None else self._seed
        job = replace(self._job, model=joined(models), seed=seed)
        job = job if estimate is None else estimate(job)
        selection = choose(job, self.plugins, self._backend)
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
            "version of torch": torch.__version__,
        }
        from tp_trainer._opening._session import open_session

        session = open_session(selection, job, facts)
        self._selection, self.current, self._opened_by = selection, session, by
        return session
