"""What a program said itself on stderr, where other processes and native code may speak too."""

import re

# multiprocessing's tracker is a process of its own. It tells of semaphores of a queue whose process was
# ended before it could be cleaned up: as a warning with its source line, or as a traceback. What it says of
# shared memory is not left out: that would be a leak.
_TRACKER = re.compile(
    r"^.*resource_tracker: (?:.*semaphore|'/mp-).*\n(?:  .*\n)?"
    r'|^Traceback \(most recent call last\):\n  File ".*multiprocessing/resource_tracker\.py".*\n'
    r"(?: .*\n)*\S.*\n",
    re.MULTILINE,
)
# Lines of torch's native log: that a socket is tried again, for example.
_NATIVE = re.compile(r"^(?:\[rank\d+\]:?)?\[[WIE]\d* .*\n", re.MULTILINE)


def own_words(stderr: str) -> str:
    """Return ``stderr`` without what the standard library's tracker and torch's native log wrote to it."""
    text = stderr if stderr.endswith("\n") or not stderr else stderr + "\n"
    return _NATIVE.sub("", _TRACKER.sub("", text))
