"""DataParallel that gathers everything, nothing, or all but some keys of a module's outputs."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_dp_gather._data_parallel import DataParallel as DataParallel
    from tp_dp_gather._data_parallel import data_parallel as data_parallel
    from tp_dp_gather._data_parallel import gather as gather
    from tp_dp_gather._data_parallel import parallel_apply as parallel_apply
    from tp_dp_gather._data_parallel import replicate as replicate
    from tp_dp_gather._data_parallel import scatter as scatter
    from tp_dp_gather._data_parallel import sort_by_device as sort_by_device
    from tp_dp_gather._options import GatherOptions as GatherOptions

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_dp_gather._data_parallel": [
                "DataParallel",
                "data_parallel",
                "gather",
                "parallel_apply",
                "replicate",
                "scatter",
                "sort_by_device",
            ],
            "tp_dp_gather._options": ["GatherOptions"],
        },
    )
