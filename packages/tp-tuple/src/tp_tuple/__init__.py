"""Data parallelism over a tuple of per-device batches, in one process.

`TupleParallel` wraps a module; `tp_collate` makes a collate function return one batch per device.
"""

from typing import TYPE_CHECKING

from tp_core import lazy_exports

if TYPE_CHECKING:
    from tp_tuple._batch import Batch, cuda_attrs, cuda_fields, recursive_cuda
    from tp_tuple._collate import default_collate, restore_order, tp_collate
    from tp_tuple._functions import cat, tuple_fn
    from tp_tuple._speeds import Speeds
    from tp_tuple._tuple_parallel import TupleParallel
    from tp_tuple._tuplewise import Tuplewise

__all__ = [
    "Batch",
    "Speeds",
    "TupleParallel",
    "Tuplewise",
    "cat",
    "cuda_attrs",
    "cuda_fields",
    "default_collate",
    "recursive_cuda",
    "restore_order",
    "tp_collate",
    "tuple_fn",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_batch": ["Batch", "cuda_attrs", "cuda_fields", "recursive_cuda"],
            "_collate": ["default_collate", "restore_order", "tp_collate"],
            "_functions": ["cat", "tuple_fn"],
            "_speeds": ["Speeds"],
            "_tuple_parallel": ["TupleParallel"],
            "_tuplewise": ["Tuplewise"],
        },
    )
