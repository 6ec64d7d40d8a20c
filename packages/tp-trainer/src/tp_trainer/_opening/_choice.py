"""Which backend runs a trainer's models: chosen once, and asked again whenever another model comes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from tp_core.errors import ConfigError, ModelError, SelectionError
from tp_core.internal import check_backend_name
from tp_core.plugins import Backend, Job, PluginRegistry, Selection, select

__all__ = ["check_choice", "check_name", "choose", "joined"]


def joined(models: Sequence[nn.Module]) -> nn.Module | None:
    """Return what stands for all models in a job: the only one, a list of several, ``None`` for none."""
    if len(models) > 1:
        return nn.ModuleList(models)
    return models[0] if models else None


def choose(job: Job, plugins: PluginRegistry, name: str) -> Selection:
    """Choose the backend for a job.

    Args:
        job: What is to be done.
        plugins: The registry to choose from.
        name: The backend that was asked for, or "auto".

    Raises:
        ConfigError: Options are given for a backend that is not installed, or that has no such options.
        ModelError: The models have DTensors, and no backend that may be chosen takes them.
        SelectionError: No backend fits, or the one that was asked for does not.
        PluginError: The backend that was asked for is broken.
    """
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
    """Notice a misspelled backend before anything is built for it.

    Args:
        plugins: The registry to choose from.
        name: The backend that was asked for, or "auto", where the variable ``TP_BACKEND`` decides.

    Raises:
        SelectionError: No backend of that name is installed.
        PluginError: The plugin that brings it is broken or blocked.
    """
    try:
        check_backend_name(name, {c.item.name for c in plugins.backends()})
    except SelectionError as error:
        _require(plugins, name)
        _note_broken(plugins, error)
        raise


def _require(plugins: PluginRegistry, name: str) -> None:
    """Raise if a broken plugin is the cause."""
    plugins.require(os.environ.get("TP_BACKEND", "auto") if name == "auto" else name)


def _note_broken(plugins: PluginRegistry, error: SelectionError) -> None:
    for broken in plugins.broken():
        error.add_note(str(broken))


def check_choice(
    selection: Selection, job: Job, plugins: PluginRegistry, name: str, *, opened_by: str, known: bool
) -> None:
    """Make sure that the backend of a running session is the right one for models that came later.

    Args:
        selection: How it was chosen.
        job: The job with all models, those from before among them.
        plugins: The registry it was chosen from.
        name: The backend that was asked for, or "auto".
        opened_by: What opened the session.
        known: Whether a model was known when it was opened.

    Raises:
        ModelError: A model has DTensors, and the backend does not take them.
        SelectionError: The backend does not fit the models; or no model was known, and another backend
            would be chosen for this one.
    """
    chosen = selection.chosen.name
    verdict = selection.backend.assess(job)
    when = f"when {opened_by} started the job, " + ("with the models before" if known else "without a model")
    remedy = (
        "give all models in one call, prepare(model, other, ...)"
        if known
        else "call fit(model, ...) or prepare(model, ...) before it"
    )
    if not verdict.is_fit:
        reason = verdict.reason + (f"; {verdict.remedy}" if verdict.remedy else "")
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
        "the model has DTensors (of fully_shard or distribute_tensor), which only a backend made for them "
        f"can train; give the plain model, which a backend shards by itself: {reasons}"
    )


def _check_options(job: Job, installed: Mapping[str, Backend[Any]]) -> None:
    """Notice what is misspelled, also for a backend that is chosen only on several ranks, say."""
    for name in job.options:
        if name not in installed:
            msg = (
                f"options are given for backend {name!r}, which is not installed; "
                f"installed: {', '.join(sorted(map(repr, installed)))}"
            )
            raise ConfigError(msg)
        installed[name].parse_options(job)
