"""DataParallel that gathers everything, nothing, or all but some keys of a module's outputs."""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_dp_gather._data_parallel import DataParallel, data_parallel
    from tp_dp_gather._functions import gather, parallel_apply, replicate, scatter, sort_by_device
    from tp_dp_gather._options import GatherOptions

    __version__: str

__all__ = [
    "DataParallel",
    "GatherOptions",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "sort_by_device",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_options": ["GatherOptions"],
            "_data_parallel": ["DataParallel", "data_parallel"],
            "_functions": ["gather", "parallel_apply", "replicate", "scatter", "sort_by_device"],
        },
    )
