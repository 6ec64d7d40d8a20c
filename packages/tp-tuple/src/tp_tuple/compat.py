"""The spellings of tuple_parallel that name CUDA: a program written for it changes its import line alone.

They move to any device. New programs use `tp_core.recursive_to`, and ``.to`` of a `tp_tuple.Batch`.
"""

from tp_tuple._batch import cuda_attrs, cuda_fields, recursive_cuda

__all__ = ["cuda_attrs", "cuda_fields", "recursive_cuda"]
