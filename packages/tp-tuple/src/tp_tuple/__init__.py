"""Data parallelism over a tuple of per-device batches, in one process.

`TupleParallel` wraps a module; `tp_collate` makes a collate function return one batch per device.
The names of `tp_tuple.compat` can be imported from here, too.
"""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_tuple import compat
    from tp_tuple._batch import Batch
    from tp_tuple._collate import default_collate, restore_order, tp_collate
    from tp_tuple._functions import cat, tuple_fn
    from tp_tuple._options import TupleOptions
    from tp_tuple._speeds import Speeds
    from tp_tuple._tuple_parallel import TupleParallel
    from tp_tuple._tuplewise import Tuplewise, tuplewise
    from tp_tuple.compat import cuda_attrs as cuda_attrs
    from tp_tuple.compat import cuda_fields as cuda_fields
    from tp_tuple.compat import recursive_cuda as recursive_cuda

    __version__: str

__all__ = [
    "Batch",
    "Speeds",
    "TupleOptions",
    "TupleParallel",
    "Tuplewise",
    "cat",
    "compat",
    "default_collate",
    "restore_order",
    "tp_collate",
    "tuple_fn",
    "tuplewise",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_options": ["TupleOptions"],
            "_batch": ["Batch", "cuda_attrs", "cuda_fields", "recursive_cuda"],
            "compat": [],
            "_collate": ["default_collate", "restore_order", "tp_collate"],
            "_functions": ["cat", "tuple_fn"],
            "_speeds": ["Speeds"],
            "_tuple_parallel": ["TupleParallel"],
            "_tuplewise": ["Tuplewise", "tuplewise"],
        },
    )
