"""The contract of a backend: it says whether it fits a job, and opens a session that runs it."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core._verdict import Verdict
from tp_core.errors import ConfigError

if TYPE_CHECKING:  # they need torch, and who only asks which plugins there are does not
    from tp_core._job import Job
    from tp_core._session import Session

__all__ = ["Backend", "NoOptions"]


@dataclasses.dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a backend that has none."""


class Backend(abc.ABC):
    """One way to run a training job.

    A subclass needs a name, :meth:`assess` and :meth:`open`; :class:`Session` has a correct
    single-device default for everything else.

    Attributes:
        name: What users write to ask for this backend.
        options_type: A frozen dataclass whose fields are the backend's options and their defaults.

    Example:
        >>> class Mine(Backend):
        ...     name = "mine"
        ...     def assess(self, job):
        ...         return Verdict.fits(60, "it is mine")
        ...     def open(self, job):
        ...         return Session(job)
    """

    name: ClassVar[str]
    options_type: ClassVar[type] = NoOptions

    @abc.abstractmethod
    def assess(self, job: "Job") -> Verdict:
        """Say whether this backend can run ``job``: cheap, and without side effects.

        Nothing is started and nothing is written: every installed backend is asked, and all but
        one are not taken.
        """

    @abc.abstractmethod
    def open(self, job: "Job") -> "Session":
        """Start what the job needs (process groups, replicas) and return the session.

        Raises:
            tp_core.errors.TpError: Something that it needs cannot be started.
        """

    def parse_options(self, job: "Job") -> Any:
        """Return this backend's options in ``job`` as an ``options_type``.

        Raises:
            ConfigError: An option has no field of that name.
        """
        given = job.options.get(self.name, {})
        known = [field.name for field in dataclasses.fields(self.options_type)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            msg = (
                f"backend {self.name!r} has no option {', '.join(map(repr, unknown))}; "
                f"it has: {', '.join(known) or 'none'}"
            )
            raise ConfigError(msg)
        return self.options_type(**given)
