"""Data parallelism over a tuple of per-device batches, in one process.

`TupleParallel` wraps a module; `tp_collate` makes a collate function return one batch per device.
The names of `tp_tuple.compat` can be imported from here, too.
"""

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)
