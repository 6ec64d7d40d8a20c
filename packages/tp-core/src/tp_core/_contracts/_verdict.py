"""Whether a candidate fits a job: how well and why, or why not."""

import math
from dataclasses import dataclass, replace
from typing import Self

from tp_core._contracts._memory import MemoryNeed
from tp_core.errors import ConfigError

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of an ``assess()``: made by :meth:`fits` or :meth:`unfit`, never directly.

    Attributes:
        score: How well the candidate fits, higher is better; ``None`` when it does not fit.
        reason: One sentence for people, without a full stop at its end.
        remedy: What to install or change to be chosen, or to do better; may be empty.
        memory: What the job needs on each device; ``None`` where that was not estimated.

    Example:
        >>> Verdict.fits(50, "one device").is_fit
        True
        >>> Verdict.unfit("needs 2 devices", remedy="devices=2").is_fit
        False
    """

    score: float | None
    reason: str
    remedy: str = ""
    memory: MemoryNeed | None = None

    def __post_init__(self) -> None:
        """Check it: an answer of another kind would end the selection for all."""
        if self.score is not None:
            _require_score(self.score)
        if not isinstance(self.reason, str) or not self.reason:
            msg = f"a verdict needs a reason: one sentence that tells a user why, got {self.reason!r}"
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

    def with_memory(self, need: MemoryNeed) -> Self:
        """Return the verdict with what the job needs: unfit where that is more than is free."""
        if not self.is_fit or need.fits:
            return replace(self, memory=need)
        return replace(self, score=None, reason=str(need), remedy=need.remedy, memory=need)

    @property
    def lacks_memory(self) -> bool:
        """Whether memory alone is what the candidate does not fit for."""
        return self.memory is not None and not self.memory.fits and self.reason == str(self.memory)

    @property
    def is_fit(self) -> bool:
        """Whether the candidate can do the job."""
        return self.score is not None


def _require_score(score: object) -> None:
    if not isinstance(score, int | float) or not math.isfinite(score):
        msg = f"a score must be a finite number, got {score!r}"
        raise ConfigError(msg)
