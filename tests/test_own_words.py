"""What other processes write to a program's stderr is told apart from its own words."""

import pytest

from tests.own_words import own_words

WARNING = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There "
    "appear to be 1 leaked {} objects to clean up at shutdown\n"
    "  warnings.warn('resource_tracker: There appear to be %d '\n"
)
GONE = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:267: UserWarning: resource_tracker: '/mp-abc': "
    "[Errno 2] No such file or directory: '/mp-abc'\n"
    "  warnings.warn('resource_tracker: %r: %s' % (name, e))\n"
)
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/usr/lib/python3.12/multiprocessing/resource_tracker.py", line 239, in main\n'
    "    cache[rtype].remove(name)\n"
    "KeyError: '/mp-abc'\n"
)
NATIVE = "[W1122 12:00:00.1 socket.cpp:755] [c10d] The client socket has failed to connect\n"
CLUSTER = "2026-01-02 03:04:05,678\tINFO worker.py:2038 -- Started a local Ray instance.\n"
KERNEL = "[IPKernelApp] WARNING | Kernel is running over TCP without encryption.\n"


@pytest.mark.parametrize("noise", [WARNING.format("semaphore"), GONE, TRACEBACK, NATIVE, CLUSTER, KERNEL])
def test_only_the_programs_own_words_are_left(noise):
    assert own_words(noise) == ""
    assert own_words("before\n" + noise + "after") == "before\nafter\n"


@pytest.mark.parametrize(
    "text",
    [
        WARNING.format("shared_memory"),
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 1\n',
        "WARNING: mine\n",
        "",
    ],
)
def test_leaks_and_errors_stay(text):
    assert own_words(text) == text
