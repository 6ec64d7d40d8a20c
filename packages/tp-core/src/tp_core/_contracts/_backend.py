"""The contract of a backend: it assesses a job (`Verdict`), and opens a session that runs it."""

import abc
import dataclasses
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from tp_core.errors import ConfigError, ModelError
from tp_core.messages import those_known

if TYPE_CHECKING:  # they need torch, and listing plugins must not import it
    from torch import nn

    from tp_core._contracts._job import Job, Layout, MemoryNeed
    from tp_core._contracts._session import Session


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of an ``assess()``: made by :meth:`fits` or :meth:`unfit`, never directly.

    Attributes:
        score: The score of a candidate that fits, higher is better; ``None`` when it does not fit.
        reason: One sentence for people, without a full stop at its end.
        remedy: The advice what to install or change to be chosen, or to do better; may be empty.
        memory: The job's need of memory on each device; ``None`` where that was not estimated.

    Example:
        >>> Verdict.fits(50, "one device").is_fit
        True
        >>> Verdict.unfit("needs 2 devices", remedy="devices=2").is_fit
        False
    """

    score: float | None
    reason: str
    remedy: str = ""
    memory: "MemoryNeed | None" = None

    def __post_init__(self) -> None:
        """Check the values: a wrong one would fail later, in the selection among all backends."""
        if self.score is not None:
            _require_score(self.score)
        if not isinstance(self.reason, str) or not self.reason:
            msg = f"a verdict needs a reason: one sentence for the user, got {self.reason!r}"
            raise ConfigError(msg)
        if not isinstance(self.remedy, str):
            msg = f"the remedy of a verdict must be a string, got {self.remedy!r}"
            raise ConfigError(msg)

    @classmethod
    def fits(cls, score: float, reason: str, *, remedy: str = "") -> Self:
        """Return the verdict that the candidate can do the job; scores are by convention from 0 to 100.

        Raises:
            ConfigError: ``score`` is not a finite number, or ``reason`` is empty or no string.
        """
        _require_score(score)
        return cls(float(score), reason, remedy)

    @classmethod
    def unfit(cls, reason: str, *, remedy: str = "") -> Self:
        """Return the verdict that the candidate cannot do the job.

        Raises:
            ConfigError: ``reason`` is empty or no string.
        """
        return cls(None, reason, remedy)

    def with_memory(self, need: "MemoryNeed") -> Self:
        """Return the verdict with the job's need of memory: unfit where that is more than is free."""
        if not self.is_fit or need.fits:
            return replace(self, memory=need)
        return replace(self, score=None, reason=str(need), remedy=need.remedy, memory=need)

    @property
    def lacks_memory(self) -> bool:
        """Whether the candidate does not fit for lack of memory only."""
        return self.memory is not None and not self.memory.fits and self.reason == str(self.memory)

    @property
    def is_fit(self) -> bool:
        """Whether the candidate can do the job."""
        return self.score is not None


def _require_score(score: object) -> None:
    if not isinstance(score, int | float) or not math.isfinite(score):
        msg = f"a score must be a finite number, got {score!r}"
        raise ConfigError(msg)


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a backend that has none."""


OptionsT = TypeVar("OptionsT")


class Backend(abc.ABC, Generic[OptionsT]):
    """One way to run a training job, with options of the type ``OptionsT``.

    A subclass needs a name, :meth:`assess` and :meth:`open`; :class:`Session` has a correct
    single-device default for everything else.

    Attributes:
        name: The name by which users choose this backend.
        options_type: A frozen dataclass of the backend's options and their defaults; by
            default one without fields.
        self_test_options: The options for batches of plain rows of features, as ``tp verify`` and the
            conformance kits have them. For a backend that expects other batches by default; by default none.
        shares_samples: Whether its session takes `Job.ranks_per_sample`, as `ProcessGroupSession` does.
            Another backend may then open this one for the weights, and split each sample over ranks.

    Example:
        >>> class Mine(Backend[NoOptions]):
        ...     name = "mine"
        ...     def assess(self, job):
        ...         return Verdict.fits(60, "it is mine")
        ...     def open(self, job):
        ...         return Session(job)
    """

    name: ClassVar[str]
    options_type: type[OptionsT] = cast("type[OptionsT]", NoOptions)
    self_test_options: ClassVar[Mapping[str, object]] = {}
    shares_samples: ClassVar[bool] = False

    @abc.abstractmethod
    def assess(self, job: "Job") -> Verdict:
        """Return whether this backend can run ``job``: cheap, and without side effects.

        It must start nothing and write nothing: every installed backend is asked, and only one is used.
        """

    def estimate_memory(self, job: "Job") -> "MemoryNeed | None":
        """Return the memory that ``job`` needs on the fullest device: cheap, and without side effects.

        The default is right where each device holds a copy of everything and gets its share of each batch.
        A backend that splits the model, or has communication buffers of its own, overrides it with its own
        estimate from ``job.footprint``. Where the sum is more than ``job.free_nbytes``, the backend does not
        fit the job, and is opened only if it was requested by name.

        Returns:
            The need; ``None`` where ``job.footprint`` is.
        """
        from tp_core._contracts._replicated_memory import replicated_memory

        if job.footprint is None:
            return None
        return replicated_memory(job, job.footprint)

    def ranks_per_model(self, job: "Job") -> int:  # noqa: ARG002 - its contract
        """Return how many ranks split the tensors of a model among them: cheap, without side effects.

        A backend that opens this one for the weights reads it. By default each rank has whole tensors.
        """
        return 1

    def layouts(self, job: "Job") -> "Iterable[Layout]":
        """Return the ways in which this backend can put ``job`` on its ranks: cheap, without side effects.

        ``tp estimate`` lists those that fit. It asks :meth:`estimate_memory` for each, with its options, and
        with a footprint of the samples of one of its readers, of which `Footprint.part` is a device's share.
        Of layouts with the same axes it shows the first that fits: the fastest comes first. The job has a
        plain model, which may be on the meta device, and its environment says how many ranks there would be.
        By default each device has a copy of the model.

        Raises:
            ConfigError: The backend cannot make any of this model; the message is shown.
            ModelError: The same.
        """
        from tp_core._contracts._job import Layout

        return [Layout(axes={"data": job.environment.world_size * len(job.devices)})]

    def adapt_model(self, model: "nn.Module", inputs: object) -> "nn.Module":  # noqa: ARG002 - its contract
        """Return a plain model in the form that this backend trains; by default as it is.

        ``tp verify`` calls it on every rank before it trains a script's model, or its own small one. A
        backend for models of another form, for example with layers that are split over ranks, converts the
        model here, in place where it can.

        Args:
            model: The model, with the same values on all ranks.
            inputs: Example inputs of the model: a tuple of arguments, a mapping of their names, or the only
                one; ``None`` where there are none.

        Raises:
            ConfigError: The backend does not train this model.
        """
        return model

    @abc.abstractmethod
    def open(self, job: "Job") -> "Session":
        """Start what the job needs (process groups, replicas) and return the session.

        Raises:
            tp_core.errors.TpError: Something that the job needs cannot be started.

        Collective: where it joins a process group, the ranks' rendezvous: every rank must call it.
        """

    def parse_options(self, job: "Job") -> OptionsT:
        """Return this backend's options in ``job``, from an object or a mapping of names.

        Raises:
            ConfigError: The options are of another type, or there is none of a given name, or a value
                is not of its field's plain type (``bool``, ``int``, ``float``, ``str``, ``Literal``).
        """
        value = job.options.get(self.name, {})
        if isinstance(value, self.options_type):
            check_option_types(value)
            return value
        if not isinstance(value, Mapping):
            msg = (
                f"the options of backend {self.name!r} must be a {self.options_type.__name__} or a mapping "
                f"of its fields, got {type(value).__name__}: {value!r}"
            )
            raise ConfigError(msg)
        known = [field.name for field in dataclasses.fields(cast("type[NoOptions]", self.options_type))]
        unknown = sorted(set(value) - set(known))
        if unknown:
            names = ", ".join(map(repr, unknown))
            msg = f"backend {self.name!r} has no option {names}{those_known(unknown[0], known)}"
            raise ConfigError(msg)
        options = self.options_type(**value)
        check_option_types(options)
        return options


class DevicesBackend(Backend[OptionsT]):
    """A backend for one process that has several devices, with a replica of the model on each."""

    def assess(self, job: "Job") -> Verdict:
        """Fit one process with several devices, and a model of whole parameters."""
        processes, count = job.environment.world_size, len(job.devices)
        if processes > 1:
            return Verdict.unfit(
                f"launched as {processes} processes, and this is for several devices in one",
                remedy="start the script without a launcher",
            )
        if count == 1:
            return Verdict.unfit(f"one device, {job.devices[0]}, and this is for several")
        if job.traits is not None and job.traits.has_sharded_parameters:
            return Verdict.unfit("the model has sharded parameters, and replicas need whole ones")
        return self.assess_devices(job)

    @abc.abstractmethod
    def assess_devices(self, job: "Job") -> Verdict:
        """Return the verdict on a job of one process with several devices."""


class RanksBackend(Backend[OptionsT]):
    """A backend for several processes with one device each."""

    def assess(self, job: "Job") -> Verdict:
        """Fit several processes with one device each, with valid options and units."""
        import torch.distributed as dist

        devices = job.devices
        if not dist.is_available():
            return Verdict.unfit("this build of torch has no torch.distributed")
        try:
            if job.environment.world_size == 1 and not self.has_use_alone(job):
                return Verdict.unfit(
                    "one process, and this takes one per device",
                    remedy=f"tp launch -n {max(2, len(devices))} script.py (pip install tp-launch)",
                )
            if len(devices) != 1:
                return Verdict.unfit(f"{len(devices)} devices in each process, and this takes one")
            return self.assess_ranks(job)
        except (ConfigError, ModelError) as error:
            return Verdict.unfit(str(error))

    def has_use_alone(self, job: "Job") -> bool:  # noqa: ARG002 - for overrides
        """Return whether a single process can use the backend, too."""
        return False

    @abc.abstractmethod
    def assess_ranks(self, job: "Job") -> Verdict:
        """Return the verdict on a job of processes with one device each.

        Raises:
            ConfigError: The options do not fit the job, which is then the reason of the verdict.
            ModelError: The model does not.
        """


# -- Checks of options ----------------------------------------------------------------------------


_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}


def check_option_types(options: object) -> None:
    """Check that fields of plain types have values of these types; a whole number is a number, too.

    Fields of other types, like functions and types that are imported for typing only, are not checked.
    """
    for field in dataclasses.fields(options):  # type: ignore[arg-type]  # any dataclass
        kinds = _plain_types(field.type)
        value = getattr(options, field.name)
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            wanted = " or ".join(dict.fromkeys(_WORDS.get(kind) or repr(kind) for kind in kinds))
            msg = f"{type(options).__name__}({field.name}=...) must be {wanted}, got {value!r}"
            raise ConfigError(msg)


def _plain_types(annotation: Any) -> list[Any]:
    """Return the allowed types, and the values of a ``Literal``; an empty list where a type is not plain."""
    if get_origin(annotation) in {Union, types.UnionType}:
        parts = [_plain_types(part) for part in get_args(annotation)]
        if all(parts):
            return [kind for part in parts for kind in part]
        return []
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and annotation in _WORDS:
        return [annotation]
    return []


def _is_of(value: object, kind: Any) -> bool:
    if not isinstance(kind, type):  # a value of a Literal
        return type(value) is type(kind) and value == kind
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)
