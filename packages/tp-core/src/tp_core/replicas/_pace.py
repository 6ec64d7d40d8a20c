"""Whether the parts are so short that waking threads for them takes longer than running them."""

__all__ = ["Pace"]

_SHORT_S = 1e-4
"""What it takes to wake a thread, to share the interpreter with it and to wait for it."""
_CALLS = 16


class Pace:
    """Follows how long the parts of the last calls took.

    Attributes:
        is_short: Whether those beyond the first had better run one after the other in the caller's
            thread: after some short calls in a row, until two are long.
    """

    def __init__(self) -> None:
        self.is_short = False
        self._short_calls = 0

    def note(self, seconds: float) -> None:
        """Note how long the parts beyond the first took, or would have taken, in the caller's thread."""
        if seconds < _SHORT_S:
            self._short_calls = min(self._short_calls + 1, _CALLS)
        else:
            self._short_calls //= 2
        if self._short_calls == _CALLS:
            self.is_short = True
        elif self._short_calls < _CALLS // 2:
            self.is_short = False
