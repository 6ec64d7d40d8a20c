"""Data parallelism over a tuple of per-device batches, in one process.

`TupleParallel` wraps a module; `tp_collate` makes a collate function return one batch per device.
The names of `tp_tuple.compat` can be imported from here, too.
"""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_core.data import restore_order as restore_order

    from tp_tuple import compat as compat
    from tp_tuple._balance import Speeds as Speeds
    from tp_tuple._batch import Batch as Batch
    from tp_tuple._collate import TupleCollate as TupleCollate
    from tp_tuple._collate import default_collate as default_collate
    from tp_tuple._collate import tp_collate as tp_collate
    from tp_tuple._functions import Tuplewise as Tuplewise
    from tp_tuple._functions import cat as cat
    from tp_tuple._functions import tuple_fn as tuple_fn
    from tp_tuple._functions import tuplewise as tuplewise
    from tp_tuple._options import TupleOptions as TupleOptions
    from tp_tuple._tuple_parallel import TupleParallel as TupleParallel
    from tp_tuple.compat import cuda_attrs as cuda_attrs
    from tp_tuple.compat import cuda_fields as cuda_fields
    from tp_tuple.compat import recursive_cuda as recursive_cuda

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.data": ["restore_order"],
            "tp_tuple": ["compat"],
            "tp_tuple._balance": ["Speeds"],
            "tp_tuple._batch": ["Batch"],
            "tp_tuple._collate": ["TupleCollate", "default_collate", "tp_collate"],
            "tp_tuple._functions": ["Tuplewise", "cat", "tuple_fn", "tuplewise"],
            "tp_tuple._options": ["TupleOptions"],
            "tp_tuple._tuple_parallel": ["TupleParallel"],
            "tp_tuple.compat": ["cuda_attrs", "cuda_fields", "recursive_cuda"],
        },
    )
