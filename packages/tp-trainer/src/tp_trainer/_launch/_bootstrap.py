"""The first few milliseconds of a rank: tie it to the launcher, then become the program.

Run by path with ``python -I -S``: it imports no package, and its process id stays that of the
program.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(argv: list[str]) -> None:
    """Become ``argv[1:]``, to be killed when the launcher, whose id is ``argv[0]``, is gone."""
    if sys.platform == "linux":
        # A launcher that was killed with SIGKILL cannot end its ranks: the kernel does it. This holds
        # through exec, unlike a thread that watches the parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The launcher may have died before that call: then no signal comes.
        if os.getppid() != int(argv[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    directory = os.environ.pop("TP_RANK_DIR", None)
    if directory is not None:
        # Renamed when complete: the launcher polls for the file, and must not read half a number.
        draft = Path(directory, "pid.part")
        draft.write_text(str(os.getpid()))
        draft.rename(Path(directory, "pid"))
    os.execv(argv[1], argv[1:])  # no shell is the point


if __name__ == "__main__":
    main(sys.argv[1:])
