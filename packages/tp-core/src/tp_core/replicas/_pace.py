"""Whether the parts are so short that waking threads for them takes longer than running them."""

__all__ = ["Pace"]

_ROUND_TRIPS = 2
"""Waking a thread costs more than its way there and back: both want the interpreter meanwhile."""
_CALLS = 16


class Pace:
    """Follows how long the parts of the last calls took.

    Args:
        round_trip_s: How long it takes here to wake a thread and to wait for it.

    Attributes:
        is_short: Whether those beyond the first had better run one after the other in the caller's
            thread: after some short calls in a row, until two are long.
    """

    def __init__(self, round_trip_s: float) -> None:
        self.is_short = False
        self._short_s = _ROUND_TRIPS * round_trip_s
        self._short_calls = 0

    def note(self, seconds: float) -> None:
        """Note how long the parts beyond the first took, or would have taken, in the caller's thread."""
        if seconds < self._short_s:
            self._short_calls = min(self._short_calls + 1, _CALLS)
        else:
            self._short_calls //= 2
        if self._short_calls == _CALLS:
            self.is_short = True
        elif self._short_calls < _CALLS // 2:
            self.is_short = False
