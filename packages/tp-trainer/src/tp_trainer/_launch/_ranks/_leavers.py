"""Notifies ranks that wait for another one that it has left with status 0.

That alone is not a failure: a rank may have less to do than the others. So it is written into the store
that the ranks share, where one that waits for the other looks.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from tp_trainer._launch._hosts._addresses import Endpoint
from tp_trainer._launch._ranks._monitor import Death, Rank

__all__ = ["Attempt", "Leavers"]

_LOOK_S = 0.5
_CONNECT_S = 10.0
_MOST_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks.

    Attributes:
        number: How many there were before.
        nodes: The hosts that take part.
        store: Where the ranks meet.
    """

    number: int
    nodes: int
    store: Endpoint


class Leavers:
    """A thread that tells of ranks that have ended well while others of this host go on.

    Args:
        deaths: Returns the ranks that have ended, by local rank.
    """

    def __init__(self, deaths: Callable[[], Mapping[int, Death]]) -> None:
        self._deaths = deaths
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._ranks: Mapping[int, Rank] = {}
        self._looks: Counter[int] = Counter()  # at which each of them was seen to have left
        self._told: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tp-launch-leavers", daemon=True)

    def follow(self, attempt: Attempt, ranks: Mapping[int, Rank]) -> None:
        """Look at the ranks of a fresh attempt."""
        with self._lock:
            self._attempt, self._ranks = attempt, dict(ranks)
            self._looks, self._told = Counter(), set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_CONNECT_S)

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            with self._lock:
                attempt, ranks = self._attempt, self._ranks
                deaths = self._deaths()
                self._looks.update(local for local, death in deaths.items() if not death.code)
                # Seen twice: ranks that end together need no telling. Where torch has collected the status,
                # it was 0 if torch lets the others go on.
                new = {
                    local
                    for local, death in deaths.items()
                    if self._looks[local] >= (2 if death.code == 0 else _MOST_LOOKS)
                } - self._told
                if attempt is None or not new or len(deaths) == len(ranks):
                    continue
                self._told |= new
            _tell(attempt, [ranks[local].rank for local in new if local in ranks])


def _tell(attempt: Attempt, left: list[int]) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported
    from tp_core.internal import LEFT_KEY

    try:
        store = TCPStore(
            attempt.store.host,
            attempt.store.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_S),
        )
        for rank in left:
            store.set(LEFT_KEY.format(attempt=attempt.number, rank=rank), "")
    except RuntimeError:
        return  # the store has gone, and who waits notices that
