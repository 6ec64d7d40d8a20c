"""The contract of a backend: it assesses a job, and opens a session that runs it."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast

from tp_core._contracts._option_values import check_option_types
from tp_core._contracts._verdict import Verdict
from tp_core.errors import ConfigError

if TYPE_CHECKING:  # they need torch, and listing plugins must not import it
    from torch import nn

    from tp_core._contracts._job import Job
    from tp_core._contracts._memory import MemoryNeed
    from tp_core._contracts._session import Session

__all__ = ["Backend", "NoOptions"]


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a backend that has none."""


OptionsT = TypeVar("OptionsT")


class Backend(abc.ABC, Generic[OptionsT]):
    """One way to run a training job, with options of the type ``OptionsT``.

    A subclass needs a name, :meth:`assess` and :meth:`open`; :class:`Session` has a correct
    single-device default for everything else.

    Attributes:
        name: What users write to ask for this backend.
        options_type: A frozen dataclass whose fields are the backend's options and their defaults; by
            default one without fields.

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

    @abc.abstractmethod
    def assess(self, job: "Job") -> Verdict:
        """Return whether this backend can run ``job``: cheap, and without side effects.

        Nothing is started and nothing is written: every installed backend is asked, and only one
        is taken.
        """

    def estimate_memory(self, job: "Job") -> "MemoryNeed | None":
        """Return what ``job`` needs on each device under this backend: cheap, and without side effects.

        This one is right where each device holds a copy of everything and gets its share of each batch. A
        backend that splits the model, or exchanges through buffers of its own, estimates otherwise, from the
        same numbers: ``job.footprint``. Where the sum is more than ``job.free_nbytes``, the backend does not
        fit the job, and is opened only if it was asked for by name.

        Returns:
            The need; ``None`` where ``job.footprint`` is.
        """
        from tp_core._contracts._whole_copies import need_of_copy

        return None if job.footprint is None else need_of_copy(job, job.footprint)

    def adapt_model(self, model: "nn.Module", inputs: object) -> "nn.Module":  # noqa: ARG002 - its contract
        """Return a plain model in the form that this backend trains; by default as it is.

        ``tp test`` calls it on every rank before it trains its own small model. A backend for models of
        another form, such as layers that are split over ranks, brings it into that form here.

        Args:
            model: The model, with the same values on all ranks.
            inputs: What it can be called with.
        """
        return model

    @abc.abstractmethod
    def open(self, job: "Job") -> "Session":
        """Start what the job needs (process groups, replicas) and return the session.

        Raises:
            tp_core.errors.TpError: Something that it needs cannot be started.
        """

    def parse_options(self, job: "Job") -> OptionsT:
        """Return this backend's options in ``job``, which has them as an object or by name.

        Raises:
            ConfigError: The options are of another type, or there is none of a given name, or a value
                is not of its field's plain type (``bool``, ``int``, ``float``, ``str``, ``Literal``).
        """
        given = job.options.get(self.name, {})
        if isinstance(given, self.options_type):
            check_option_types(given)
            return given
        if not isinstance(given, Mapping):
            msg = (
                f"the options of backend {self.name!r} must be a {self.options_type.__name__} or a mapping "
                f"of its fields, got {type(given).__name__}: {given!r}"
            )
            raise ConfigError(msg)
        known = [field.name for field in dataclasses.fields(cast("type[NoOptions]", self.options_type))]
        unknown = sorted(set(given) - set(known))
        if unknown:
            msg = (
                f"backend {self.name!r} has no option {', '.join(map(repr, unknown))}; "
                f"it has: {', '.join(known) or 'none'}"
            )
            raise ConfigError(msg)
        options = self.options_type(**given)
        check_option_types(options)
        return options
