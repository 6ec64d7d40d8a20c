"""DataParallel that gathers everything, nothing, or all but some keys of a module's outputs."""

from tp_dp_gather._data_parallel import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]
