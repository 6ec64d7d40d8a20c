"""What the tp packages share among themselves: it may change with any version."""

from typing import TYPE_CHECKING

from tp_core._lazy import exports_of_stub, lazy_exports

if TYPE_CHECKING:
    from tp_core._data._batches import split_evenly
    from tp_core._data._seeding import seed_of, seeded
    from tp_core._devices._containers import Container, PerType, containers
    from tp_core._devices._resolve import device_of_rank
    from tp_core._fully_sharded._given import describe_given, given_mesh
    from tp_core._fully_sharded._gradients import total_shard_norm
    from tp_core._fully_sharded._options import check_offload, parameter_type, reduction_type
    from tp_core._fully_sharded._session import FullyShardedSession
    from tp_core._fully_sharded._sharding import Sharding
    from tp_core._fully_sharded._units import Units, find_units
    from tp_core._launch._store import LEFT_KEY, has_left, rendezvous_store
    from tp_core._launch._terminal import Progress, in_notebook, shows_progress
    from tp_core._steps._backward import backward_of_nothing
    from tp_core._steps._optimizer_kinds import whole_matrix_optimizer
    from tp_core._steps._rows import SampleRows, join_rows, row_count
    from tp_core._tensors._atomic import sync_folder, write_atomically
    from tp_core._tensors._sharding import is_dtensor
    from tp_core.plugins._select import KNOWN_BACKENDS, check_backend_name

__all__ = [
    "KNOWN_BACKENDS",
    "LEFT_KEY",
    "Container",
    "FullyShardedSession",
    "PerType",
    "Progress",
    "SampleRows",
    "Sharding",
    "Units",
    "backward_of_nothing",
    "check_backend_name",
    "check_offload",
    "containers",
    "describe_given",
    "device_of_rank",
    "exports_of_stub",
    "find_units",
    "given_mesh",
    "has_left",
    "in_notebook",
    "is_dtensor",
    "join_rows",
    "lazy_exports",
    "parameter_type",
    "reduction_type",
    "rendezvous_store",
    "row_count",
    "seed_of",
    "seeded",
    "shows_progress",
    "split_evenly",
    "sync_folder",
    "total_shard_norm",
    "whole_matrix_optimizer",
    "write_atomically",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "._data._batches": ["split_evenly"],
            "._data._seeding": ["seed_of", "seeded"],
            "._devices._containers": ["Container", "PerType", "containers"],
            "._devices._resolve": ["device_of_rank"],
            "._fully_sharded._given": ["describe_given", "given_mesh"],
            "._fully_sharded._gradients": ["total_shard_norm"],
            "._fully_sharded._options": ["check_offload", "parameter_type", "reduction_type"],
            "._fully_sharded._session": ["FullyShardedSession"],
            "._fully_sharded._sharding": ["Sharding"],
            "._fully_sharded._units": ["Units", "find_units"],
            "._launch._store": ["LEFT_KEY", "has_left", "rendezvous_store"],
            "._launch._terminal": ["Progress", "in_notebook", "shows_progress"],
            "._lazy": ["exports_of_stub", "lazy_exports"],
            "._steps._backward": ["backward_of_nothing"],
            "._steps._rows": ["SampleRows", "join_rows", "row_count"],
            "._steps._optimizer_kinds": ["whole_matrix_optimizer"],
            "._tensors._atomic": ["sync_folder", "write_atomically"],
            "._tensors._sharding": ["is_dtensor"],
            ".plugins._select": ["KNOWN_BACKENDS", "check_backend_name"],
        },
    )
