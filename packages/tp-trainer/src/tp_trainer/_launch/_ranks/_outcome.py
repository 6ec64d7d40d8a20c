"""How a launch ended, as one value."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tp_trainer._launch._ranks._failure import Failure, code_name

__all__ = ["Outcome", "report", "say"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended: the exit status, and why when it is not 0.

    Attributes:
        status: 0, the exit code of the rank that failed first, or 128 + a signal.
        failure: The rank that failed first, if one did.
        message: Why nothing ran or the run was cut short, if it was so.
        stopped_by: The signal that ended this launch, if one did.
        account: What was saved when it did, or why nothing was.
    """

    status: int
    failure: Failure | None = None
    message: str = ""
    stopped_by: int | None = None
    account: str = ""

    @classmethod
    def stopped(cls, signum: int, account: str) -> Self:
        """Return the end by a signal."""
        message = f"stopped by {code_name(-signum)}; {account}"
        return cls(128 + signum, message=message, stopped_by=signum, account=account)

    def to_report(self, *, host: str) -> dict[str, Any]:
        """Return the outcome for the other hosts, as values that JSON can hold.

        Args:
            host: The host that the message is of; "" if the message names it.
        """
        failure = None if self.failure is None else self.failure.to_dict()
        return {
            "status": self.status,
            "failure": failure,
            "message": f"host {host}: {self.message}" if host and self.message else self.message,
        }

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """Return the outcome that another host has reported."""
        failure = None if report["failure"] is None else Failure(**report["failure"])
        return cls(report["status"], failure=failure, message=report["message"])


def report(outcome: Outcome) -> None:
    """Print on stderr, last of all, why a launch failed."""
    sys.stdout.flush()
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr, flush=True)
    elif outcome.message:
        say(outcome.message)


def say(line: str) -> None:
    """Print a line of the launcher itself, on stderr."""
    print(f"tp launch: {line}", file=sys.stderr, flush=True)
