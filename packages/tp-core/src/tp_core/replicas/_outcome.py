"""How the calls of the replicas ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Outcome", "raise_first"]


@dataclass(slots=True)
class Outcome:
    """How one replica's call ended."""

    result: Any = None
    error: BaseException | None = None

    def fill(self, task: Callable[[], Any]) -> None:
        """Run ``task`` here and keep how it ends."""
        try:
            self.result = task()
        except BaseException as error:  # noqa: BLE001 - raised again when all parts are done
            self.error = error

    @property
    def interrupted(self) -> bool:
        """Whether it ended with an exception that is not an error: Ctrl-C, an exit."""
        return self.error is not None and not isinstance(self.error, Exception)


def raise_first(outcomes: Sequence[Outcome], devices: Sequence[torch.device]) -> None:
    """Raise the error of the first part that has one, if any has.

    Interrupts come before errors. The type is kept, so that callers catch what the module raises; a
    note tells where it happened, and what else failed.
    """
    failed = [i for i, o in enumerate(outcomes) if o.error is not None]
    if not failed:
        return
    failed.sort(key=lambda i: not outcomes[i].interrupted)
    first, *others = failed
    error = outcomes[first].error
    notes = [f"in part {first} of {len(outcomes)}, on device {devices[first]}"]
    notes += [f"part {i} on device {devices[i]} failed too: {outcomes[i].error!r}" for i in others]
    for outcome in outcomes:
        outcome.error = None  # its traceback leads back here: a cycle would keep the parts alive
    try:
        if error is not None:
            error.add_note("; ".join(notes))
            raise error
    finally:
        error = None
