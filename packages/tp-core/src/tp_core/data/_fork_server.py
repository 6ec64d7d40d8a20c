"""A module that multiprocessing's fork server preloads, so that the server survives signals.

Workers end when the process that forked them is gone. So a signal to the whole process group would kill
the server, and the workers with it: the server blocks these signals. Its children begin with them
blocked, and so does every thread that starts while they import. One thread that does not block a signal
is enough to lose the process. Workers unblock the signals once they ignore them, other children once they
know what to run.

Importing this module changes the signal mask of the process: only the server may import it.
"""

import signal
from multiprocessing import current_process, util

import tp_core._launch._safe_path  # noqa: F401 - drops the variable of the server's start

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def _begin(_: object) -> None:
    """Unblock the signals in a child of the server that is no worker, once it knows which process it is."""
    if not getattr(current_process(), "outlives_signals", False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
util.register_after_fork(_begin, _begin)
