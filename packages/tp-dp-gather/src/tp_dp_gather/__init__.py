"""DataParallel that gathers everything, nothing, or all but some keys of a module's outputs."""

from typing import TYPE_CHECKING

from tp_core import lazy_exports

if TYPE_CHECKING:
    from tp_dp_gather._data_parallel import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_data_parallel": ["DataParallel", "data_parallel"],
        },
    )
