"""Sessions over several processes: torch's process group, its collectives."""

from typing import TYPE_CHECKING

from tp_core._lazy import lazy_exports

if TYPE_CHECKING:
    from tp_core._contracts._session import ReduceOp as ReduceOp
    from tp_core.sessions._object_exchange import agree_on_failure as agree_on_failure
    from tp_core.sessions._object_exchange import gather_objects as gather_objects
    from tp_core.sessions._per_module import PerModule as PerModule
    from tp_core.sessions._process_group import all_gather_single as all_gather_single
    from tp_core.sessions._process_group import join_process_group as join_process_group
    from tp_core.sessions._process_group import new_process_group as new_process_group
    from tp_core.sessions._process_group import reduce_scatter_single as reduce_scatter_single
    from tp_core.sessions._process_group import rendezvous_store as rendezvous_store
    from tp_core.sessions._process_group_session import ProcessGroupSession as ProcessGroupSession
    from tp_core.sessions._wrapper import SessionWrapper as SessionWrapper
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_core._contracts._session": ["ReduceOp"],
            "tp_core.sessions._object_exchange": ["agree_on_failure", "gather_objects"],
            "tp_core.sessions._per_module": ["PerModule"],
            "tp_core.sessions._process_group": [
                "all_gather_single",
                "join_process_group",
                "new_process_group",
                "reduce_scatter_single",
                "rendezvous_store",
            ],
            "tp_core.sessions._process_group_session": ["ProcessGroupSession"],
            "tp_core.sessions._wrapper": ["SessionWrapper"],
        },
    )
