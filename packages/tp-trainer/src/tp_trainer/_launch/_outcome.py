"""How a launch ended, as one value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tp_trainer._launch._failure import Failure, code_name


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: the exit status, and why when it is not 0.

    Attributes:
        status: 0, the exit code of the rank that failed first, or 128 + a signal.
        failure: The rank that failed first, if one did.
        message: Why nothing ran or the run was cut short, if it was so.
        stopped_by: The signal that ended this launch, if one did.
    """

    status: int
    failure: Failure | None = None
    message: str = ""
    stopped_by: int | None = None

    @classmethod
    def stopped(cls, signum: int) -> Self:
        """The end by a signal."""
        return cls(128 + signum, message=f"stopped by {code_name(-signum)}", stopped_by=signum)

    def to_news(self, *, host: str) -> dict[str, Any]:
        """The outcome for the other hosts, as values that JSON can hold.

        Args:
            host: Whose words the message is; "" if it says so itself.
        """
        failure = None if self.failure is None else self.failure.to_dict()
        return {
            "status": self.status,
            "failure": failure,
            "message": f"host {host}: {self.message}" if host and self.message else self.message,
        }

    @classmethod
    def from_news(cls, news: Mapping[str, Any]) -> Self:
        """The outcome that another host told."""
        failure = None if news["failure"] is None else Failure(**news["failure"])
        return cls(news["status"], failure=failure, message=news["message"])


def report(outcome: Outcome) -> None:
    """Say on stderr, last of all, why a launch did not end well."""
    sys.stdout.flush()
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr, flush=True)
    elif outcome.message:
        say(outcome.message)


def say(line: str) -> None:
    """A line of the launcher itself, on stderr."""
    print(f"tp launch: {line}", file=sys.stderr, flush=True)
