"""Preloaded by multiprocessing's fork server: it outlives the signals that ask a run to end.

Workers end when the process that forked them is gone. So a signal to the whole group, which kills the
server, would end them, too: it blocks these signals. Its children begin with them blocked, and with
them every thread that is started while they import what they need: one thread that lets a signal
through is enough to lose the process. Workers let them through once they ignore them, the others when
they know what they are to run.

Importing this module changes the signal mask of the process: it is for the server alone.
"""

import signal
from multiprocessing import current_process, util

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def _begin(_: object) -> None:
    """Called in a child of the server when it knows what process it is to be."""
    if not getattr(current_process(), "outlives_signals", False):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
util.register_after_fork(_begin, _begin)
