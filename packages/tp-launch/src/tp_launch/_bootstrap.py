"""The first few milliseconds of a rank: tie it to the launcher, then exec the program.

It runs by path with ``python -I -S``, so it imports no package. exec keeps the process id.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(argv: list[str]) -> None:
    """Exec ``argv[1:]``, to be killed when the launcher with the process id ``argv[0]`` is gone."""
    if sys.platform == "linux":
        # A launcher that was killed by SIGKILL cannot end its ranks, so the kernel must. The setting survives
        # exec, unlike a thread that watches the parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the launcher died before that call, no signal comes.
        if os.getppid() != int(argv[0]):
            os.kill(os.getpid(), signal.SIGKILL)
    directory = os.environ.pop("TP_RANK_DIR", None)
    if directory is not None:
        # Renamed when complete: the launcher polls for the file and must not read half a number.
        draft = Path(directory, "pid.part")
        draft.write_text(str(os.getpid()))
        draft.rename(Path(directory, "pid"))
    os.execv(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
