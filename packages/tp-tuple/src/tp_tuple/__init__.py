"""Data parallelism over a tuple of per-device batches, in one process.

`TupleParallel` wraps a module; `tp_collate` makes a collate function return one batch per device.
"""

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
