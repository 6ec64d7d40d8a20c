"""Tell the other hosts of a job why it failed, through the store at which they met.

Without it each host knows only its own ranks: one that waits in a collective for a rank which died
elsewhere waits for the deadline of the collective, and then reports the wait instead of the cause.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tp_trainer._launch._hosts import Endpoint

_POLL_S = 0.3
_CONNECT_S = 10.0
_LINGER_S = 3.0  # how long the host of the store stays for the others to read
_HEARSAY_S = 6.0  # how long a host that only noticed a loss waits to hear the cause


# Where torch's agents wait, deaf and for five minutes, for those that are not done. Should torch move
# it, that wait is back; nothing else breaks.
_BARRIER = "torchelastic/agent/terminal_state/last_member"


class Herald:
    """One host's line to the others; a thread listens.

    Args:
        endpoint: Where the store is.
        run_id: The name of the job.
        serves: Whether this host serves the store: it leaves last.
        on_news: Called from the thread when another host has told why it failed.
    """

    def __init__(self, endpoint: Endpoint, *, run_id: str, serves: bool, on_news: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._prefix = f"tp-launch/{run_id}"
        self._serves = serves
        self._on_news = on_news
        self._nodes = 1
        self._rounds = 0  # how often the hosts have met
        self._has_left = False
        self._store: Any = None
        self._lock = threading.Lock()  # one conversation with the store at a time
        self._news: dict[str, Any] | None = None
        self._tried = threading.Event()  # the store is there, or never will be
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, nodes: int) -> None:
        """Listen, as one of ``nodes`` hosts; once is enough for all restarts."""
        self._nodes = nodes
        self._rounds += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tp-launch-herald", daemon=True)
            self._thread.start()

    def tell(self, news: Mapping[str, Any], *, sure: bool) -> dict[str, Any] | None:
        """Say why this host failed, and return the first cause that a host has told.

        Args:
            news: Values that JSON can hold.
            sure: Whether it is a cause; otherwise another host may know better and is waited for.

        Returns:
            The news of this host or of another one; None when the store has gone.
        """
        if self._thread is None:
            return None
        self._tried.wait(_CONNECT_S)  # a rank may have failed in its first moments
        deadline = time.monotonic() + (0.0 if sure else _HEARSAY_S)
        while not self._listen() and self._store is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._news is None and self._store is not None:
            with self._talking():
                # The first one wins, also between two hosts that tell at once.
                told = self._store.compare_set(f"{self._prefix}/cause", "", json.dumps(dict(news)))
                self._news = json.loads(told)
        self._leave()
        return self._news

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)  # it may still be connecting

    def news(self) -> dict[str, Any] | None:
        """What another host has told, if one has."""
        return self._news

    def _run(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported

        with self._talking():
            # "Master" in the process that serves already means: share that server, and keep it up.
            self._store = TCPStore(
                self._endpoint.host,
                self._endpoint.port,
                is_master=self._serves,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=_CONNECT_S),
            )
        self._tried.set()
        while self._store is not None and not self._ending.wait(_POLL_S):
            if self._listen():
                self._on_news()
                self._release()
                self._leave()
                return

    def _listen(self) -> bool:
        if self._news is None and self._store is not None:
            with self._talking():
                key = f"{self._prefix}/cause"
                if self._store.check([key]):
                    self._news = json.loads(self._store.get(key))
        return self._news is not None

    def _release(self) -> None:
        """Let an agent whose ranks are all done go: the ones it waits for will never be."""
        met = [self._run_id, *(f"torch.rendezvous.{self._run_id}.{i}" for i in range(self._rounds))]
        with self._talking():
            for prefix in met:  # the first one is that of the static rendezvous
                self._store.set(f"{prefix}/{_BARRIER}", "")

    def _leave(self) -> None:
        """Count this host as told; the one that serves waits for the rest."""
        if self._has_left:
            return
        self._has_left = True
        deadline = time.monotonic() + _LINGER_S
        with self._talking():
            told = self._store.add(f"{self._prefix}/told", 1)
            while self._serves and told < self._nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                told = self._store.add(f"{self._prefix}/told", 0)

    @contextlib.contextmanager
    def _talking(self) -> Any:
        with self._lock:
            try:
                yield
            except (RuntimeError, ValueError, AttributeError):
                self._store = None  # its host has gone: there is nobody left to talk to
