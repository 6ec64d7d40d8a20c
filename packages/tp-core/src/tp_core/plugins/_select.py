"""The selection of the backend that runs a job, with each candidate's verdict."""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from tp_core._contracts._backend import Backend, Verdict
from tp_core._contracts._job import Job, MemoryNeed
from tp_core._first_party import FIRST_PARTY
from tp_core.errors import ContractError, PluginError, SelectionError
from tp_core.plugins._hooks import Contribution, PluginInfo, call, describe

BACKEND_VARIABLE = "TP_BACKEND"

KNOWN_BACKENDS: Mapping[str, str] = {
    "context": "tp-context",
    "ddp": "tp-trainer",
    "dp-gather": "tp-dp-gather",
    "fsdp": "tp-trainer",
    "pipeline": "tp-pipeline",
    "shard": "tp-shard",
    "single": "tp-trainer",
    "tuple": "tp-tuple",
}
"""Backends of this project and the distribution of each, for messages only."""

SLOW_S = 1.0
"""Seconds above which an ``assess()`` is reported as slow: every job asks every installed backend."""

DEADLINE_S = 60.0
"""Seconds after which an ``assess()`` of another project that has not returned counts as unfit."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend, where it came from, and its verdict on the job.

    Attributes:
        backend: The backend itself.
        distribution: The distribution that brings it, or the name it was registered under.
        version: The version of that distribution; empty for one that a script registered.
        verdict: Its verdict on the job.
        error: The error of ``assess()``, if it raised one; the verdict is then unfit.
        seconds: The seconds that ``assess()`` took.
    """

    backend: Backend[Any]
    distribution: str
    version: str
    verdict: Verdict
    error: BaseException | None = None
    seconds: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether ``assess()`` took longer than a call for every job should."""
        return self.seconds > SLOW_S

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    @property
    def origin(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class Selection:
    """The backend that runs the job, and the verdicts of all candidates.

    ``str()`` of it is a table for people.

    Attributes:
        chosen: The candidate that runs the job.
        candidates: All of them, best first, unfit ones last.
        asked_by: The source of the choice: "auto", or where the name came from.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    asked_by: str

    @property
    def backend(self) -> Backend[Any]:
        """The chosen backend."""
        return self.chosen.backend

    def __str__(self) -> str:
        head = f"backend {self.chosen.name!r} ({self.asked_by}): {_reason(self.chosen.verdict)}"
        return "\n".join([head, *format_candidates(self.candidates, chosen=self.chosen.name)])


def select(
    job: Job,
    backends: Iterable[Contribution[Backend[Any]]],
    *,
    name: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Selection:
    """Choose the backend that runs ``job``.

    A ``name`` wins over the variable ``TP_BACKEND``, which wins over "auto": the best-scored
    fit, ties by name. Every candidate is assessed and keeps its verdict.

    Args:
        job: What is to be done.
        backends: The installed backends, as the registry gives them.
        name: The backend that the user asked for; ``None`` or "auto" leaves it to the variable
            and then to the scores.
        environ: Where to look for ``TP_BACKEND``; the process's environment by default.

    Raises:
        SelectionError: No backend of that name is installed, it does not fit, or none does. The
            message has every candidate's reason, and what to install or change.
        PluginError: The backend that was asked for raised while it assessed the job.
    """
    candidates = tuple(sorted((_assess(job, c) for c in backends), key=_rank))
    environ = os.environ if environ is None else environ
    wanted, asked_by = _wanted(name, environ)
    if wanted is None:
        chosen = next((c for c in candidates if c.verdict.is_fit), None)
        if chosen is None:
            lines = ["no installed backend fits this job", *_advice(candidates)]
            if any(c.verdict.lacks_memory for c in candidates):
                lines.append(
                    "one that is asked for by name is tried, whatever the estimate of its memory says"
                )
            raise SelectionError("\n".join(lines))
        return Selection(chosen, candidates, asked_by)
    chosen = next((c for c in candidates if c.name == wanted), None)
    if chosen is None:
        raise SelectionError(_unknown(wanted, asked_by, {c.name for c in candidates}))
    if chosen.error is not None:
        msg = f"backend {wanted!r} ({asked_by}) of {chosen.origin} cannot be used: {chosen.verdict.reason}"
        raise PluginError(msg) from chosen.error
    if not chosen.verdict.is_fit and not chosen.verdict.lacks_memory:
        if chosen.verdict.remedy:
            remedy = f"; {chosen.verdict.remedy}"
        else:
            remedy = ""
        msg = f"backend {wanted!r} ({asked_by}) does not fit: {chosen.verdict.reason}{remedy}"
        raise SelectionError(msg)
    return Selection(chosen, candidates, asked_by)


def check_backend_name(
    name: str | None, installed: Collection[str], *, environ: Mapping[str, str] | None = None
) -> None:
    """Check that the requested backend is installed, before any job is known.

    Raises:
        SelectionError: The backend is not installed; the message suggests a similar name.
    """
    environ = os.environ if environ is None else environ
    wanted, asked_by = _wanted(name, environ)
    if wanted is not None and wanted not in installed:
        raise SelectionError(_unknown(wanted, asked_by, installed))


def format_candidates(candidates: Iterable[Candidate], *, chosen: str | None) -> Iterator[str]:
    """Yield one line for each candidate: mark, name, origin, score, reason and remedy."""
    rows = []
    for candidate in candidates:
        mark = "*" if candidate.name == chosen else "-"
        score = candidate.verdict.score
        text = "unfit" if score is None else f"{score:g}"
        rows.append((mark, candidate.name, candidate.origin, text, _explained(candidate)))
    if rows:
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
    else:
        widths = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        yield "  " + "  ".join([*cells, row[4]])


def _explained(candidate: Candidate) -> str:
    text = _reason(candidate.verdict)
    if candidate.verdict.remedy:
        text += f"; {candidate.verdict.remedy}"
    if candidate.is_slow:
        text += f" (its assess() took {candidate.seconds:.1f} s)"
    return text


def _reason(verdict: Verdict) -> str:
    if verdict.memory is None or verdict.lacks_memory:
        return verdict.reason
    return f"{verdict.reason}; {verdict.memory}"


def _assess(job: Job, contribution: Contribution[Backend[Any]]) -> Candidate:
    backend, origin = contribution.item, contribution.distribution
    info = PluginInfo(contribution.plugin, origin, contribution.version)
    error: BaseException | None = None
    began = perf_counter()
    answer = partial(_answer, backend, job)
    if origin not in FIRST_PARTY:
        answer = partial(_in_time, answer)
    try:
        verdict = call(info, "asked", answer)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # noqa: BLE001 - a plugin may raise anything
        verdict, error = Verdict.unfit(f"assess() raised {describe(e)}"), e
    if verdict.is_fit:
        try:
            need = backend.estimate_memory(job)
            if not isinstance(need, MemoryNeed | None):
                msg = f"it must return a MemoryNeed or None, got {type(need).__name__}"
                raise ContractError(msg)
            if need is not None:
                verdict = verdict.with_memory(need)
        except Exception as e:  # noqa: BLE001 - a plugin may raise anything
            verdict, error = Verdict.unfit(f"estimate_memory() raised {describe(e)}"), e
    seconds = perf_counter() - began
    return Candidate(backend, origin, contribution.version, verdict, error, seconds)


def _answer(backend: Backend[Any], job: Job) -> Verdict:
    verdict: object = backend.assess(job)
    if not isinstance(verdict, Verdict):
        msg = f"it must return a Verdict, got {type(verdict).__name__}"
        raise ContractError(msg)
    return verdict


def _in_time(question: Callable[[], T]) -> T:
    """Return the answer to a question, or raise TimeoutError after `DEADLINE_S`."""
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that asked
            errors.append(error)

    # A daemon thread, as a call cannot be interrupted from outside: one that never returns must neither
    # keep the job waiting nor the interpreter from exiting.
    thread = threading.Thread(target=ask, daemon=True, name="tp-assess")
    thread.start()
    thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if not answers:
        msg = f"it had no answer after {DEADLINE_S:g} s; what takes long belongs into open()"
        raise TimeoutError(msg)
    return answers[0]


def _rank(candidate: Candidate) -> tuple[float, str]:
    score = candidate.verdict.score
    return (float("inf") if score is None else -score, candidate.name)


def _wanted(name: str | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    if name not in {None, "auto"}:
        return name, "asked for"
    variable = environ.get(BACKEND_VARIABLE, "")
    if variable not in {"", "auto"}:
        return variable, f"asked for by {BACKEND_VARIABLE}"
    return None, "auto"


def _unknown(wanted: str, asked_by: str, installed: Collection[str]) -> str:
    names = ", ".join(map(repr, sorted(installed))) or "none"
    lines = [f"backend {wanted!r} ({asked_by}) is not installed; installed: {names}"]
    missing = {name: source for name, source in KNOWN_BACKENDS.items() if name not in installed}
    known = sorted({*installed, *KNOWN_BACKENDS})
    if wanted in missing:
        lines.append(f"to get it: pip install {missing[wanted]}")
    elif wanted in ("gloo", "nccl", "mpi"):
        lines.append(f"{wanted!r} is a transport of torch.distributed, which is chosen by the devices")
    elif wanted in ("deepspeed", "fully_shard", "zero"):
        lines.append("'fsdp' shards weights, gradients and optimizer state")
    elif similar := get_close_matches(str(wanted).lower(), known, n=1):
        if similar[0] in missing:
            source = f" (pip install {missing[similar[0]]})"
        else:
            source = ""
        lines.append(f"did you mean {similar[0]!r}{source}?")
    elif missing:
        offers = ", ".join(f"{n!r} (pip install {d})" for n, d in sorted(missing.items()))
        lines.append(f"this project also offers: {offers}")
    return "\n".join(lines)


def _advice(candidates: tuple[Candidate, ...]) -> Iterator[str]:
    if candidates:
        yield from format_candidates(candidates, chosen=None)
    else:
        yield "none is installed; one device and DDP come with: pip install tp-trainer"
