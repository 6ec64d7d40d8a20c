"""The line of Python that a race was found at."""

import sys
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent)


def current_line() -> str:
    """Return "file:line: " of the innermost frame that is neither torch's nor ours; "" if there is none.

    A thread of autograd runs no line of Python, unless it calls a hook.
    """
    import torch

    hidden = (_OWN, str(Path(torch.__file__).parent))
    # From the stack, as loggers and warnings have it: torch calls the simulator from within an operator, and
    # passes no line.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(hidden):
        frame = frame.f_back
    if frame is not None:
        return f"{frame.f_code.co_filename}:{frame.f_lineno}: "
    return ""
