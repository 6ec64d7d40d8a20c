"""One module on several devices of one process, kept there and refreshed only when it changes.

`Replicas` is device-neutral: ``["cuda:0", "cuda:1"]``, ``["cpu", "cpu"]`` and ``["cuda:0", "cpu"]``
take the same path. `ReplicaWrapper` is the base of modules that run them; what else calls them may be
marked as `untraced`.
"""

from tp_core.replicas._random import has_modes
from tp_core.replicas._replicas import Replicas, untraced
from tp_core.replicas._wrapper import ReplicaWrapper

__all__ = ["ReplicaWrapper", "Replicas", "has_modes", "untraced"]
