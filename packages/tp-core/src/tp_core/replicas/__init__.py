"""One module on several devices of one process, kept there and refreshed only when it changes.

`Replicas` is device-neutral: ``["cuda:0", "cuda:1"]``, ``["cpu", "cpu"]`` and ``["cuda:0", "cpu"]``
take the same path.
"""

from tp_core.replicas._replicas import Replicas

__all__ = ["Replicas"]
