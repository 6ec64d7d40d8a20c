from tp_tuple import compat as compat
from tp_tuple._batch import Batch as Batch
from tp_tuple._collate import TupleCollate as TupleCollate
from tp_tuple._collate import default_collate as default_collate
from tp_tuple._collate import restore_order as restore_order
from tp_tuple._collate import tp_collate as tp_collate
from tp_tuple._functions import cat as cat
from tp_tuple._functions import tuple_fn as tuple_fn
from tp_tuple._options import TupleOptions as TupleOptions
from tp_tuple._speeds import Speeds as Speeds
from tp_tuple._tuple_parallel import TupleParallel as TupleParallel
from tp_tuple._tuplewise import Tuplewise as Tuplewise
from tp_tuple._tuplewise import tuplewise as tuplewise
from tp_tuple.compat import cuda_attrs as cuda_attrs
from tp_tuple.compat import cuda_fields as cuda_fields
from tp_tuple.compat import recursive_cuda as recursive_cuda

__version__: str
