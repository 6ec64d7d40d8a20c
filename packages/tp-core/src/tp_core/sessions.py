"""Sessions over several processes: torch's process group, its collectives, fully sharded models."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._process_group_session import ProcessGroupSession as ProcessGroupSession
    from tp_core._contracts._session import ReduceOp as ReduceOp
    from tp_core._contracts._session import SessionWrapper as SessionWrapper
    from tp_core._fully_sharded._options import FullyShardOptions as FullyShardOptions
    from tp_core._launch._process_group import join_process_group as join_process_group
    from tp_core._launch._process_group import new_process_group as new_process_group
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._process_group_session": ["ProcessGroupSession"],
            "tp_core._contracts._session": ["ReduceOp", "SessionWrapper"],
            "tp_core._fully_sharded._options": ["FullyShardOptions"],
            "tp_core._launch._process_group": ["join_process_group", "new_process_group"],
        },
    )
