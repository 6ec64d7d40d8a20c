"""Signals that ask a run to end, noted when they come and acted on between two steps."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from tp_core import Session

__all__ = ["Interrupted", "Vigil"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_INTERVAL_S = 0.5


class Interrupted(SystemExit):
    """A signal asked the run to end, and it did so after a step, with its state saved.

    Not caught, it ends the process with the conventional status: 128 and the signal's number. It is
    no ``Exception``: a handler for errors must not keep a process alive that was asked to end.

    Attributes:
        signal: Which one.
        checkpoint: Where the state is, or ``None`` if nothing was saved.
    """

    def __init__(self, number: int, checkpoint: Any) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"{self.signal.name}: the run ended after a step; saved: {self.checkpoint}"


class Vigil:
    """Watches for signals, and lets all ranks learn of one at the same step.

    Ranks get a signal at different moments. Between two steps, twice a second and at the same steps
    everywhere, they tell each other what they have seen. A second Ctrl-C interrupts at once.

    Args:
        session: Whose ranks are asked.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen = 0
        self._previous: dict[int, Any] = {}
        self._asked = time.perf_counter()
        self._interval = 1  # steps between two questions

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._seen = self._seen or number

    def ask(self, *, due: bool) -> tuple[int, bool]:
        """Return the signal that a rank has seen, or 0, and whether rank 0 says that ``due`` is true.

        Collectives: one all-gather of objects over all ranks.
        """
        elapsed = time.perf_counter() - self._asked
        answers = self._session.gather_objects((self._seen, due, elapsed))
        self._asked = time.perf_counter()
        slowest = max(elapsed for _, _, elapsed in answers)
        factor = _INTERVAL_S / max(slowest, 1e-6)
        self._interval = max(1, int(self._interval * min(factor, 10.0)))
        return max(seen for seen, _, _ in answers), answers[0][1]

    @property
    def interval(self) -> int:
        """How many steps from one question to the next: the same on all ranks."""
        return self._interval
