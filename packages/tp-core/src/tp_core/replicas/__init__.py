"""One module on several devices of one process, kept there and refreshed only when it changes.

`Replicas` takes any devices: ``["cuda:0", "cuda:1"]``, ``["cpu", "cpu"]`` and ``["cuda:0", "cpu"]`` use
the same code. `ReplicaWrapper` is the base of modules that run replicas. Mark other functions that call
them as `untraced`.
"""

from tp_core.modules._compiler import not_compiled_alone, untraced
from tp_core.replicas._caller import autocast_like_first
from tp_core.replicas._random import is_random_op
from tp_core.replicas._replicas import Replicas, leave_to_others
from tp_core.replicas._wrapper import ReplicaWrapper

__all__ = [
    "ReplicaWrapper",
    "Replicas",
    "autocast_like_first",
    "is_random_op",
    "leave_to_others",
    "not_compiled_alone",
    "untraced",
]
