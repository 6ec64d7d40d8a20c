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
# What Ray says when it starts a cluster on this machine, and a kernel of Jupyter of its sockets.
_CLUSTER = re.compile(
    r"^\d{4}-\d\d-\d\d .*\t(?:INFO|WARNING) \w+\.py:\d+ -- .*\n"
    r"|^.* TqdmWarning: .*\n(?:  .*\n)?"
    # Its handler of SIGTERM, with which Jupyter ends a kernel.
    r"|^\*\*\* SIGTERM received .*\n|^PC: @ .*\n|^ *@ +0x.*\n|^\[\d{4}-.* logging\.cc:\d+: .*\n",
    re.MULTILINE,
)
_KERNEL = re.compile(r"^\[IPKernelApp\] WARNING .*\n", re.MULTILINE)


def own_words(stderr: str) -> str:
    """Return ``stderr`` without what multiprocessing's tracker, torch's native log, Ray and Jupyter wrote."""
    text = stderr if stderr.endswith("\n") or not stderr else stderr + "\n"
    for others in (_TRACKER, _NATIVE, _CLUSTER, _KERNEL):
        text = others.sub("", text)
    return text
