"""Files and folders that are written whole or not at all, and that one process at a time owns."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core.files._atomic import atomic_part as atomic_part
    from tp_core.files._atomic import showing_system_errors as showing_system_errors
    from tp_core.files._atomic import sync_folder as sync_folder
    from tp_core.files._atomic import write_atomically as write_atomically
    from tp_core.files._ownership import Ownership as Ownership
    from tp_core.files._ownership import lock_file_of as lock_file_of
    from tp_core.files._ownership import run_in as run_in
    from tp_core.files._reads import is_absence as is_absence
    from tp_core.files._reads import is_regular_file as is_regular_file
    from tp_core.files._reads import retry_read as retry_read
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core.files._atomic": [
                "atomic_part",
                "showing_system_errors",
                "sync_folder",
                "write_atomically",
            ],
            "tp_core.files._ownership": ["Ownership", "lock_file_of", "run_in"],
            "tp_core.files._reads": ["is_absence", "is_regular_file", "retry_read"],
        },
    )
